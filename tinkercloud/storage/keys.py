"""API keys: shown once, stored as SHA-256, compared in constant time."""

import hashlib
import hmac
import secrets
import sqlite3
import time
from contextlib import closing
from importlib.resources import files
from pathlib import Path

from tinkercloud.storage.upgrades import add_later_columns

DATABASE_NAME = "tinkercloud.db"
KEY_PREFIX = "tml-"  # the official client refuses other keys (wire specification, section 16)
DEFAULT_USER = "default"
CACHE_S = 1.0  # a revoked key works at most this much longer in a running server


def schema() -> str:
    """The statements that make every table that is not there yet."""
    return files("tinkercloud.storage").joinpath("schema.sql").read_text(encoding="utf-8")


def prepare_database_file(data_dir: Path) -> Path:
    """Make data_dir (mode 0700) and a database file (0600) where missing; its path.

    A file of an earlier version gets the columns that it lacks, before the schema names them.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    data_dir.chmod(0o700)
    path = data_dir / DATABASE_NAME
    path.touch(mode=0o600, exist_ok=True)
    path.chmod(0o600)
    with closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as connection:
        add_later_columns(connection)
    return path


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyStore:
    """Synchronous, because the command line uses it too; a lookup is served from memory."""

    def __init__(self, data_dir: Path):
        path = prepare_database_file(data_dir)
        self._connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(schema())
        self._cached: list[tuple[bytes, str]] = []
        self._cached_at = float("-inf")

    def close(self) -> None:
        self._connection.close()

    def ensure_first_key(self) -> str | None:
        """Where there is no key at all, one for the user "default": its plaintext. Else None."""
        if self._connection.execute("SELECT 1 FROM keys LIMIT 1").fetchone():
            return None
        return self.add(DEFAULT_USER)

    def add(self, user: str) -> str:
        """A new key of `user`; the plaintext is not kept."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        row = ("key-" + secrets.token_hex(4), user, _digest(key), time.time())
        with self._connection:
            self._connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", row)
        self._cached_at = float("-inf")
        return key

    def list(self) -> list[tuple[str, str, float]]:
        """(id, user, created_at) of every key, oldest first."""
        query = "SELECT key_id, user, created_at FROM keys ORDER BY created_at, key_id"
        return self._connection.execute(query).fetchall()

    def revoke(self, key_id: str) -> bool:
        """Whether there was such a key."""
        with self._connection:
            cursor = self._connection.execute("DELETE FROM keys WHERE key_id = ?", (key_id,))
        self._cached_at = float("-inf")
        return cursor.rowcount > 0

    def user_of(self, key: str) -> str | None:
        """The user of a key, None where it has none. Keys of other processes count at once."""
        digest = _digest(key)
        if time.monotonic() - self._cached_at < CACHE_S:
            user = self._match(digest)
            if user is not None:
                return user
        self._cached = self._connection.execute("SELECT sha256, user FROM keys").fetchall()
        self._cached_at = time.monotonic()
        return self._match(digest)

    def _match(self, digest: bytes) -> str | None:
        match = None
        for stored, user in self._cached:  # no early exit: the time must not depend on the key
            if hmac.compare_digest(stored, digest):
                match = user
        return match
