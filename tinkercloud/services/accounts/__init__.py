"""Who calls, in which session, and what it used."""
