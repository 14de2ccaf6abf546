"""What operations of lanes have in common on record: bodies, and whether they change models."""

import json
from dataclasses import dataclass

from pydantic import BaseModel

from tinker_gmi.types import LoadWeightsRequest
from tinkercloud.storage.futures import Outcome, Ticket
from tinkercloud.storage.journal import STEP_KIND

# Operations that change their model.
CREATE, LOAD = "CreateModel", "LoadWeights"
FORWARD_BACKWARD, OPTIM_STEP = "ForwardBackward", STEP_KIND
PUBLISH = "SaveWeightsForSampler"


@dataclass(frozen=True, slots=True)
class Loading:
    """A checkpoint to put into a model. owner: the other account whose checkpoints may be read; ""
    for a token that is nobody's key. creates: the model begins with it."""

    body: LoadWeightsRequest
    owner: str | None
    creates: bool = False

    def encoded(self) -> bytes:
        return json.dumps([as_json(self.body).decode(), self.owner, self.creates]).encode()

    @classmethod
    def decoded(cls, request: bytes) -> "Loading":
        body, owner, creates = json.loads(request)
        return cls(LoadWeightsRequest.model_validate_json(body), owner, creates)


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
