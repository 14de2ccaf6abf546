"""Training: models, the optimizer, micro-batches and their forward and backward passes."""
