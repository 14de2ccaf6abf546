"""The draft head: its network, cache, drafts, training losses."""
