"""What is on record of models and their weights, and how they come back from it."""
