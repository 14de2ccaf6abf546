"""What operations of lanes have in common on record: bodies, and whether they change models."""

import json

from pydantic import BaseModel

from tinkercloud.storage.futures import Outcome, Ticket


def as_json(body: BaseModel) -> bytes:
    """What `model_validate_json` reads again."""
    return body.model_dump_json(exclude_none=True).encode()


def changes_if_completed(ticket: Ticket, outcome: Outcome) -> bool:
    return outcome.status == "completed"


def never(ticket: Ticket, outcome: Outcome) -> bool:
    """It reads the model only."""
    return False


def is_users_fault(outcome: Outcome) -> bool:
    return outcome.status == "failed" and json.loads(outcome.body)["category"] == "user"
