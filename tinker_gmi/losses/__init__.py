"""Losses that the user writes: differentiated here, or traced and run by the server."""
