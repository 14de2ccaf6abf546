"""Agents on public packages. None of them knows that it is trained."""
