"""Continuous batching: engine, scheduler, sequences, prompt log-probabilities, speculation."""
