"""Capture sessions of agents, and their rewards."""
