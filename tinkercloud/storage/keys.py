"""API keys: shown once, stored as SHA-256, compared in constant time."""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tinkercloud.storage.audit_log import INSERT_ENTRY
from tinkercloud.storage.connections import SQLITE, Connector
from tinkercloud.storage.database_file import named_faults, prepare_database_file
from tinkercloud.storage.quota import Quota
from tinkercloud.storage.tokens import TOKEN_PREFIX, TokenSigner

KEY_PREFIX = "tml-"  # the official client refuses other keys (wire specification, section 16)
DEFAULT_USER = "default"
CACHE_S = 1.0  # a revoked key, and its tokens, work at most this much longer in a running server
OPERATOR = "operator"  # in the audit log: whoever has the machine's command line
_ID_PREFIX = "key-"
UNLIMITED = Quota()

Role = Literal["admin", "user", "read-only"]
"""Of a key. user: all that is its user's. read-only: sees that, and neither trains, samples nor
changes. admin: a user's, and sees, ends and deletes what is anybody's."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """name, note: what whoever made the key wrote; the name is the id where there is none."""

    key_id: str
    user: str
    digest: bytes = field(repr=False)
    name: str = ""
    note: str = ""
    role: Role = "user"
    quota: Quota = UNLIMITED

    @property
    def number(self) -> int:
        """The id as clients want it, a number."""
        return int(self.key_id.removeprefix(_ID_PREFIX), 16)


class ListedKey(NamedTuple):
    key_id: str
    user: str
    created_at: float
    role: Role
    quota: Quota
    name: str


class KeyStore:
    """Synchronous, because the command line uses it too; a lookup is served from memory."""

    def __init__(self, data_dir: Path, connector: Connector = SQLITE):
        path = prepare_database_file(data_dir, connector)
        self._connection = connector.connect(path, autocommit=False)
        with named_faults(path):
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._signer = TokenSigner(self.secret("tokens"))
        self._cached: list[KeyRecord] = []
        self._cached_at = float("-inf")

    def close(self) -> None:
        self._connection.close()

    def ensure_first_key(self) -> str | None:
        """Where there is no key at all, one for the user "default": its plaintext. Else None."""
        if self._connection.execute("SELECT 1 FROM keys LIMIT 1").fetchone():
            return None
        return self.add(DEFAULT_USER)

    def add(
        self,
        user: str,
        *,
        name: str = "",
        note: str = "",
        role: Role = "user",
        quota: Quota = UNLIMITED,
    ) -> str:
        """A new key of `user`; the plaintext is not kept."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        key_id = _ID_PREFIX + secrets.token_hex(4)
        row = (key_id, user, _digest(key), time.time(), role, quota.encoded())
        with self._connection:
            self._connection.execute(
                "INSERT INTO keys (key_id, user, sha256, created_at, role, quota)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )
            if name or note:
                label = (key_id, name, note)
                self._connection.execute("INSERT INTO key_labels VALUES (?, ?, ?)", label)
            about = {"key_id": key_id, "role": role, "quota": quota.limits()}
            self._audit(user, "api_key_created", actor=OPERATOR, **about)
        self._cached_at = float("-inf")
        return key

    def set(self, key_id: str, *, role: Role, quota: Quota) -> None:
        """Of a key that there is; its tokens have them too."""
        with self._connection:
            query = "UPDATE keys SET role = ?, quota = ? WHERE key_id = ? RETURNING user"
            rows = self._connection.execute(query, (role, quota.encoded(), key_id)).fetchall()
            about = {"key_id": key_id, "role": role, "quota": quota.limits()}
            for (user,) in rows:
                self._audit(user, "api_key_changed", actor=OPERATOR, **about)
        self._cached_at = float("-inf")

    def list(self) -> list[ListedKey]:
        """Every key, oldest first."""
        rows = self._connection.execute(
            "SELECT key_id, user, created_at, role, quota, COALESCE(name, '')"
            " FROM keys LEFT JOIN key_labels USING (key_id) ORDER BY created_at, key_id"
        )
        return [
            ListedKey(key_id, user, created_at, role, Quota.decoded(quota), name)
            for key_id, user, created_at, role, quota, name in rows
        ]

    def revoke(self, key_id: str, *, actor: str = OPERATOR) -> bool:
        """Whether there was such a key. Its tokens end with it."""
        with self._connection:
            query = "DELETE FROM keys WHERE key_id = ? RETURNING user"
            users = self._connection.execute(query, (key_id,)).fetchall()
            self._connection.execute("DELETE FROM key_labels WHERE key_id = ?", (key_id,))
            for (user,) in users:
                self._audit(user, "api_key_deleted", actor=actor, key_id=key_id)
        self._cached_at = float("-inf")
        return bool(users)

    def _audit(self, user: str, event: str, **details: object) -> None:
        entry = (time.time(), user, "organizations", event, json.dumps(details))
        self._connection.execute(INSERT_ENTRY, entry)

    def user_of(self, key: str) -> str | None:
        """The user of a key, or of a token that stands for one; None where it has none."""
        record = self.identify(key)
        return None if record is None else record.user

    def identify(self, credential: str, use: str = "") -> KeyRecord | None:
        """The key that was shown, itself or by a token for this use. Keys of other processes count
        at once."""
        if credential.startswith(TOKEN_PREFIX):
            claims = self._signer.claims(credential)
            if claims is None or claims.get("use", "") != use:
                return None
            key_id = str(claims.get("key_id"))
            return self._find(lambda: next((r for r in self._cached if r.key_id == key_id), None))
        digest = _digest(credential)
        return self._find(lambda: self._match(digest))

    def token(self, key_id: str, claims: Mapping[str, object]) -> str:
        """A token that stands for the key until it expires or the key is revoked."""
        return self._signer.sign({**claims, "key_id": key_id})

    def users(self) -> frozenset[str]:
        """Who has a key."""
        if not self._is_fresh():
            self._read()
        return frozenset(record.user for record in self._cached)

    def _find(self, lookup: Callable[[], KeyRecord | None]) -> KeyRecord | None:
        if self._is_fresh():
            record = lookup()
            if record is not None:
                return record
        self._read()
        return lookup()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._cached_at < CACHE_S

    def _read(self) -> None:
        rows = self._connection.execute(
            "SELECT key_id, user, sha256, COALESCE(name, ''), COALESCE(note, ''), role,"
            " quota FROM keys LEFT JOIN key_labels USING (key_id)"
        )
        self._cached = [KeyRecord(*fields, quota=Quota.decoded(quota)) for *fields, quota in rows]
        self._cached_at = time.monotonic()

    def _match(self, digest: bytes) -> KeyRecord | None:
        match = None
        for record in self._cached:  # no early exit: the time must not depend on the key
            if hmac.compare_digest(record.digest, digest):
                match = record
        return match

    def secret(self, name: str) -> bytes:
        """A random secret of this server, the same after every start."""
        fresh = secrets.token_bytes(32)
        with self._connection:
            self._connection.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, fresh))
        query = "SELECT value FROM secrets WHERE name = ?"
        return self._connection.execute(query, (name,)).fetchone()[0]
