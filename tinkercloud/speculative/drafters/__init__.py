"""The contract of drafters, the table of them, and those that need no weights."""
