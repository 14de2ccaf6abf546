"""A pool's models as models of the server that sample only."""
