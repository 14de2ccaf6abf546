"""Drafters that need the target's weights or passes: heads and draft models."""
