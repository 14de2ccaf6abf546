"""A model's layers on several machines, computed by llama.cpp over its RPC."""
