"""Continuous batching: the engine, its sequences, prompt log-probabilities and speculation."""
