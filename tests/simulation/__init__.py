"""The service in one thread under one seed: its own code on a simulated clock, network, disk."""
