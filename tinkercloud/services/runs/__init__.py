"""Training runs that are kept: done again, branched, compared, and receipts of what they gave."""
