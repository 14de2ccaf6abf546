"""Base models, adapters and checkpoints as files: what every backend reads and writes."""
