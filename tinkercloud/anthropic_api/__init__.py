"""Anthropic's API: its bodies, checked and in our form, and its answers; no HTTP."""
