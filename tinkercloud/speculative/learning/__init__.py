"""What drafts learn from, and when: collected cases, the replay buffer, versions, time budget."""
