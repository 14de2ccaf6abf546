"""Grammars of requests: what is compiled, and which tokens it allows next. No torch."""
