"""Drafts of another machine over networks of any delay: `tinkercloud bench pipeline`."""
