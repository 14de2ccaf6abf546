"""A set of GPUs and what runs there: ranks, engines, the versions of weights that these serve."""
