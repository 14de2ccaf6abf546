"""One machine, PyTorch: the trainer and the sampler in a process of their own."""
