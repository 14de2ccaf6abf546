"""Drafters in other processes or on other machines, over gRPC."""
