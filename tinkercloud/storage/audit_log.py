"""The audit log: who did what to which checkpoint, project or key."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # keys are audited too, and the database opens their file
    from tinkercloud.storage.database import Database

AuditResource = Literal["checkpoints", "projects", "organizations"]

INSERT_ENTRY = "INSERT INTO audit_log (at, user, resource, event, details) VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    at: float
    event: str
    details: Mapping[str, Any]
    user: str
    """In whose log it is."""


def whose(user: str | None, column: str = "user") -> str:
    """A condition with one parameter, the user; None: no condition."""
    return "? IS NULL" if user is None else f"{column} = ?"


class AuditLog:
    def __init__(self, database: "Database"):
        self._database = database

    async def record(
        self, user: str, resource: AuditResource, event: str, /, **details: object
    ) -> None:
        """user: whose log it belongs in, the owner of the resource. event: RESOURCE_ACTION, such as
        "checkpoint_saved". An `actor` among the details is who did it, where that is not the owner.
        """
        text = json.dumps({"actor": user, **details})
        await self._database.write(INSERT_ENTRY, time.time(), user, resource, event, text)

    async def entries(
        self, user: str | None, resource: AuditResource | None, first: float, end: float
    ) -> list[AuditEntry]:
        """Of [first, end) in seconds since the epoch, in order. None: of all logs, of all
        resources."""
        rows = await self._database.all(
            f"SELECT at, event, details, user FROM audit_log WHERE {whose(user)}"
            " AND at >= ? AND at < ? AND (? IS NULL OR resource = ?) ORDER BY at, entry_id",
            *(user, first, end, resource, resource),
        )
        return [
            AuditEntry(row["at"], row["event"], json.loads(row["details"]), row["user"])
            for row in rows
        ]
