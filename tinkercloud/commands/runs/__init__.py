"""Training runs that are kept: computed again, branched, compared, checked."""
