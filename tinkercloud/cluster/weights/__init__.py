"""Weights between Megatron-core ranks, Hugging Face files and engines."""
