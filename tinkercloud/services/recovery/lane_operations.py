"""What operations of lanes have in common on record: bodies, and whether they change models."""

import json
from dataclasses import dataclass
from hashlib import sha256

from pydantic import BaseModel

from tinker_gmi.types import LoadWeightsRequest
from tinkercloud.core.pending import Work
from tinkercloud.errors import TinkercloudError
from tinkercloud.storage.futures import Outcome, Ticket
from tinkercloud.storage.journal import STEP_KIND

# Operations that change their model.
CREATE, LOAD = "CreateModel", "LoadWeights"
FORWARD_BACKWARD, OPTIM_STEP = "ForwardBackward", STEP_KIND
PUBLISH = "SaveWeightsForSampler"


@dataclass(frozen=True, slots=True)
class Loading:
    """A checkpoint to put into a model. owner: the other account whose checkpoints may be read; ""
    for a token that is nobody's key."""

    body: LoadWeightsRequest
    owner: str | None

    def encoded(self) -> bytes:
        return json.dumps([as_json(self.body).decode(), self.owner]).encode()

    @classmethod
    def decoded(cls, request: bytes) -> "Loading":
        body, owner = json.loads(request)[:2]  # older rows have a third
        return cls(LoadWeightsRequest.model_validate_json(body), owner)


def as_json(body: BaseModel) -> bytes:
    """What `model_validate_json` reads again."""
    return body.model_dump_json(exclude_none=True).encode()


def changes_if_completed(ticket: Ticket, outcome: Outcome) -> bool:
    return outcome.status == "completed"


@dataclass(frozen=True, slots=True)
class Submitted:
    """An operation as it goes on record. request: what makes its work again. digest: of what its
    client asks for. num_tokens: the most that it may use."""

    request: bytes
    digest: bytes
    num_tokens: int = 0

    @classmethod
    def of(cls, request: bytes, sent: bytes | None = None) -> "Submitted":
        """sent: what the client sent, where the request has more than that."""
        return cls(request, sha256(request if sent is None else sent).digest())


def refusal(error: TinkercloudError) -> Work:
    async def work() -> Outcome:
        raise error

    return work


def never(ticket: Ticket, outcome: Outcome) -> bool:
    """It reads the model only."""
    return False
