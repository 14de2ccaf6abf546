"""Checkpoints by a bare name: what `load_state("step-100")` means.

SDKs send the path of a state as it was written, and scripts write the name that they saved. It is
looked for where the caller stands, then further away, and never guessed.
"""

import re
from dataclasses import dataclass

from tinkercloud.errors import CheckpointNotFound, InvalidRequest
from tinkercloud.storage.metadata import Checkpoint, MetadataStorage

MAX_CANDIDATES = 5
_BARE = re.compile(r"(?:(weights|sampler_weights)/)?((?!\.)[A-Za-z0-9._-]{1,128})")


@dataclass(frozen=True, slots=True)
class Nearby:
    """Where a name is looked for first: the model that loads it, then the models of its session."""

    model_id: str | None = None
    session_id: str | None = None


async def full_path(
    metadata: MetadataStorage, user: str, path: str, nearby: Nearby | None = None
) -> str:
    """The tinker:// path of a bare NAME or SEGMENT/NAME of the user's; any other text as it is.

    Without a segment the name is a training state's. Raises CheckpointNotFound, and InvalidRequest
    with the candidates where several have the name.
    """
    match = _BARE.fullmatch(path)
    if match is None:
        return path
    named = await metadata.checkpoints_named(user, match[1] or "weights", match[2])
    for candidates in _by_distance(named, nearby or Nearby()):
        if len(candidates) > 1:
            raise InvalidRequest(_ambiguous(path, candidates))
        if candidates:
            return candidates[0].tinker_path
    raise CheckpointNotFound(path)


def _by_distance(named: list[Checkpoint], nearby: Nearby) -> list[list[Checkpoint]]:
    of_session = f"{nearby.session_id}:"
    return [
        [c for c in named if c.model_id == nearby.model_id],
        [c for c in named if nearby.session_id and c.model_id.startswith(of_session)],
        named,
    ]


def _ambiguous(name: str, candidates: list[Checkpoint]) -> str:
    paths = [checkpoint.tinker_path for checkpoint in candidates[:MAX_CANDIDATES]]
    more = f", and {len(candidates) - len(paths)} more" if len(candidates) > len(paths) else ""
    return f"{name!r} is the name of several checkpoints; name one of {', '.join(paths)}{more}"
