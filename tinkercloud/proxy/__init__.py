"""OpenAI's API in front of two upstreams, one that drafts and one that verifies; no torch."""
