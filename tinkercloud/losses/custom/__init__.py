"""Custom losses: traced graphs of clients, interpreted by a table of operations."""
