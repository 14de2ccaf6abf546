"""C kernels for a CPU, compiled at the first start, and their bindings."""
