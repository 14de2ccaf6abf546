"""tinker_gmi: a light Python client of the Tinker training API."""
