"""Tokens of a request as its engines draw them, over as many attempts as it takes.

A request that an engine dropped is sent again and draws the same tokens, but for rounding. What a
stream has cannot be taken back, so those tokens are committed: the next attempt is ordered to draw
them (`sampling_params.custom_params`), and what it says of them is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinkercloud.cluster.rollout.generate import Aborted, finish_of, topk_of_rows
from tinkercloud.core.types import OnTokens, SampleRequest, TokenChunk

OUTPUT_FIELDS = ("output_token_logprobs", "output_top_logprobs")


@dataclass(slots=True)
class _Stream:
    """Of one sample: SGLang's rows, one for each token."""

    rows: dict[str, list[Any]] = field(default_factory=lambda: {n: [] for n in OUTPUT_FIELDS})
    num_read: int = 0  # of the current attempt


class TokenStreams:
    """Of all samples of a request. on_tokens: as `Backend.sample` has it."""

    def __init__(self, request: SampleRequest, on_tokens: OnTokens):
        self._request, self._on_tokens = request, on_tokens
        self._streams = [_Stream() for _ in range(request.num_samples)]

    def begin(self) -> list[list[int]]:
        """An attempt. Returns what each sample must begin with."""
        for stream in self._streams:
            stream.num_read = 0
        return [[row[1] for row in stream.rows[OUTPUT_FIELDS[0]]] for stream in self._streams]

    def take(self, index: int, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        """The `meta_info` of one event of a sample. Returns SGLang's answer so far, as it would
        have been in one piece. Raises Aborted."""
        reason = finish_of(meta)
        stream = self._streams[index]
        rows = meta.get(OUTPUT_FIELDS[0]) or []
        # Incremental or not, an event's last row is that of its last token.
        end = meta.get("output_token_logprobs_length", stream.num_read + len(rows))
        first = len(stream.rows[OUTPUT_FIELDS[0]])
        num_new = min(end - first, len(rows))
        stream.num_read = end
        if num_new > 0:
            for name in OUTPUT_FIELDS:
                stream.rows[name] += (meta.get(name) or [])[-num_new:]
            self._hand_on(index, rows[-num_new:], meta, reason)
        return {"meta_info": {**meta, **stream.rows}}

    def _hand_on(
        self, index: int, rows: list[Any], meta: Mapping[str, Any], reason: str | None
    ) -> None:
        if reason not in (None, "stop", "length"):
            raise Aborted(f"the engine ended a sample by {reason!r}")
        k = self._request.topk_sample_logprobs
        top = (meta.get(OUTPUT_FIELDS[1]) or [])[-len(rows) :]
        chunk = TokenChunk(
            index,
            np.array([row[1] for row in rows], np.int32),
            np.array([row[0] for row in rows], np.float32),
            None if reason is None else "stop" if reason == "stop" else "length",
            topk_of_rows(top, k) if k else None,
        )
        self._on_tokens(chunk)
