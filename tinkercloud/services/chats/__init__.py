"""Conversations and texts on top of sampling."""
