"""Conversations as prompts, and sampled tokens as text, tool calls and reasoning; no HTTP."""
