"""Training ranks: Megatron-core models, their optimizer, micro-batches and checkpoints."""
