"""Columns that tables got after a release: added to the files of earlier versions."""

import sqlite3

LATER_COLUMNS = (
    ("futures", "sampler_id", "TEXT"),
    ("futures", "started_at", "REAL"),
    ("futures", "request", "BLOB"),
)


def add_later_columns(connection: sqlite3.Connection) -> None:
    """Nothing happens for tables that are not there yet: the schema makes them whole."""
    for table, column, kind in LATER_COLUMNS:
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if columns and column not in columns:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
