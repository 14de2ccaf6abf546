"""Many machines: Ray places, Megatron-core trains, SGLang samples."""
