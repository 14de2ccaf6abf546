"""The bodies of the API: requests, answers, tensors. `tinker_gmi.types` has them by name."""
