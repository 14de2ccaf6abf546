"""Training of drafts while a server runs, from what its passes and samples leave."""
