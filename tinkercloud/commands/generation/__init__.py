"""Texts and conversations on a running server."""
