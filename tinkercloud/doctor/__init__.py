"""Whether a backend can run here: probes gather facts, checks judge them, a report shows them."""
