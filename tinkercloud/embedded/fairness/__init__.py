"""What users of one engine are given, compared between them."""
