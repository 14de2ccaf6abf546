"""Model files to many machines at once: pieces by their digests, from whoever has them."""
