"""The console's routes: its page, what that reads, and how a browser signs in."""
