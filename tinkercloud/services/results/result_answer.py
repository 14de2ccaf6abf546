"""Finished results as answers: as they are kept, or as JSON text that is written while it is
sent."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

from tinkercloud.core.pending_requests import is_sampling
from tinkercloud.storage.futures import JSON_TYPE, PROTOBUF_TYPE, Outcome, failed
from tinkercloud.wire.codec import decode_sample_output, decode_train_output
from tinkercloud.wire.json_view import is_finite, sample_output_json, train_output_json

INLINE_BYTES = 16 * 1024  # the JSON of larger results is written off the event loop
PIECE_BYTES = 64 * 1024
DECODED_FACTOR = 3  # of the result's bytes: themselves, their message, its arrays

NOT_JSON = failed(
    "the result has numbers that are not finite (training diverged, or a target is impossible), "
    "and JSON has no form for them; lower the learning rate, or read them with tinker 0.18.1 or "
    "newer, which takes protobuf",
    "user",
)


@dataclass(frozen=True, slots=True)
class ResultAnswer:
    """body: whole, or in pieces that are made while they are sent. memory_bytes: what it takes
    until it is sent."""

    content_type: str
    body: bytes | AsyncGenerator[bytes, None]
    memory_bytes: int


def as_kept(outcome: Outcome) -> ResultAnswer:
    return ResultAnswer(outcome.content_type, outcome.body, len(outcome.body))


class JsonWriter:
    """Writes one piece at a time, of all results together: a thread that writes takes the GIL from
    the event loop, and several would let it wait for each of them."""

    def __init__(self) -> None:
        self._writing = asyncio.Lock()

    def plain(self, request_id: str, outcome: Outcome) -> ResultAnswer:
        """The result alone, for SDKs up to 0.18.0: their types admit null among the
        log-probabilities of a prompt, and nowhere else that a number is not finite."""
        if outcome.content_type != PROTOBUF_TYPE:
            return as_kept(outcome)
        return self._answer(outcome, _plain_text(request_id, outcome.body))

    def status(self, request_id: str, outcome: Outcome) -> ResultAnswer:
        """The result as a part of its request's status, whatever its own form."""
        return self._answer(outcome, _status_text(request_id, outcome))

    def _answer(self, outcome: Outcome, text: Iterable[str]) -> ResultAnswer:
        pieces = _pieces(text)
        if len(outcome.body) <= INLINE_BYTES:
            body = b"".join(pieces)
            return ResultAnswer(JSON_TYPE, body, len(body))
        memory_bytes = DECODED_FACTOR * len(outcome.body)
        return ResultAnswer(JSON_TYPE, self._in_threads(pieces), memory_bytes)

    async def _in_threads(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        piece = b""
        while piece is not None:
            yield piece
            async with self._writing:
                piece = await asyncio.to_thread(next, pieces, None)


def _plain_text(request_id: str, body: bytes) -> Iterator[str]:
    if is_sampling(request_id):
        yield from sample_output_json(decode_sample_output(body))
        return
    output = decode_train_output(body)
    yield from train_output_json(output) if is_finite(output) else [NOT_JSON.body.decode()]


def _status_text(request_id: str, outcome: Outcome) -> Iterator[str]:
    yield f'{{"request_id": {json.dumps(request_id)}, "status": "{outcome.status}", "result": '
    if outcome.content_type != PROTOBUF_TYPE:
        yield outcome.body.decode()
    elif is_sampling(request_id):
        yield from sample_output_json(decode_sample_output(outcome.body))
    else:
        yield from train_output_json(decode_train_output(outcome.body))
    yield "}"


def _pieces(text: Iterable[str]) -> Iterator[bytes]:
    """Of about PIECE_BYTES each."""
    parts: list[str] = []
    num_characters = 0
    for part in text:
        parts.append(part)
        num_characters += len(part)
        if num_characters >= PIECE_BYTES:
            yield "".join(parts).encode()
            parts, num_characters = [], 0
    yield "".join(parts).encode()
