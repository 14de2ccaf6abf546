"""Adapters inside Megatron-core layers: where they attach and how they compute."""
