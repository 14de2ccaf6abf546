"""What clients read of what was computed: results that they poll, listings, curves of runs."""
