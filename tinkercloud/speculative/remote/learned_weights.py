"""What a draft model has learned at an engine, as it is sent to workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.messages import BadMessage

PIECE_BYTES = 4 * 1024**2
MAX_BYTES = 128 * 1024**2
"""Of an adapter; an engine's queue holds as many pieces, and its rounds."""


@dataclass(frozen=True, slots=True)
class LearnedWeights:
    """content: a safetensors file with the tensors of an adapter. scale: of their product."""

    content: bytes
    scale: float

    @property
    def digest(self) -> bytes:
        return sha256(self.content).digest()

    @property
    def short_digest(self) -> str:
        return self.digest.hex()[:12]

    def messages(self) -> list[pb.Weights]:
        """In pieces."""
        digest, size = self.digest, max(1, len(self.content))
        return [
            pb.Weights(
                digest=digest, piece=self.content[first : first + PIECE_BYTES], scale=self.scale,
                is_last=first + PIECE_BYTES >= size,
            )
            for first in range(0, size, PIECE_BYTES)
        ]  # fmt: skip


class IncomingWeights:
    """The pieces that have come."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, message: pb.Weights) -> LearnedWeights | None:
        """All of them with the last piece. Raises BadMessage."""
        self._pieces.append(message.piece)
        if _size(self._pieces) > MAX_BYTES:
            raise BadMessage(f"weights of more than {MAX_BYTES} bytes")
        if not message.is_last:
            return None
        pieces, self._pieces = self._pieces, []
        weights = LearnedWeights(b"".join(pieces), message.scale)
        if weights.digest != message.digest:
            raise BadMessage("weights that are not those of their digest")
        return weights


def _size(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))
