"""Checkpoints: saving, finding, publishing, copying, and files out."""
