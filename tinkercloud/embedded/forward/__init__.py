"""Forward passes for sampling: runners, keys and values in blocks, CUDA graphs and kernels."""
