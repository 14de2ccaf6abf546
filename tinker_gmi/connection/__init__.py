"""A session with a server: HTTP and its retries, credentials, polls, order, errors, futures."""
