"""tinkercloud: a Tinker training service on your own machines."""

__version__ = "0.1.0"
