"""Base models and published versions in memory, and the device that holds them."""
