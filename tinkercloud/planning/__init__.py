"""Plans for clusters: which layout of a network fits on which GPUs, and what it costs."""
