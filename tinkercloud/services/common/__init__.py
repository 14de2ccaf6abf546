"""What several services share: numbers of requests, base models on offer, bodies."""
