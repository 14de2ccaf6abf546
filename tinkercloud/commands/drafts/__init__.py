"""Drafts for speculative decoding, from collecting to choosing."""
