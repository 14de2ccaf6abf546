"""Who holds which GPU and when: placement groups, memory phases, process lifetimes."""
