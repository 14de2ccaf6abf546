"""What an operator sees of a running server: whether it is ready, and its metrics."""
