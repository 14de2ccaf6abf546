"""The engine process: its supervisor, its worker, and the messages between them."""
