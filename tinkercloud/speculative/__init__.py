"""Speculative decoding: what is drafted, and what of it stands."""
