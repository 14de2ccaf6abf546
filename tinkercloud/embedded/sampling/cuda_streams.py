"""Lanes of a round: prompts are read beside drafting and verifying, on streams of their own.

    main     --+------------------------------------------+-- samples begin
    PREFILL    +-- pass over prompts --------- its logits --+
    DRAFT      +-- drafts --+                  |            |
    VERIFY                  +-- pass, draw ----+------------+

A lane begins after what was queued on the main stream and on the lanes it is told to come after;
at the round's end the main stream waits for all lanes. So of two pieces of work only prefill's pass
and what others do meanwhile may run at once, and that is without a race:

- Keys and values. A pass writes to blocks that its sequence alone holds. What it reads besides was
  written in an earlier round: blocks are shared once they are full and named, they are named where
  a pass's results are taken, and looked up before the round's first pass; who needs a block that is
  being computed in this round waits (`underway` in the engine) and holds none of it. Blocks given
  back while a pass runs are nobody's that it reads, since it holds those.
- CUDA graphs, their one memory pool and their buffers. Prefill's pass has several rows of each
  sequence, which graphs never serve; drafts, verification and what is drawn from prefill's logits
  come one after the other.
- Memory. An allocator gives what was freed to the same stream's next work. Whoever used it on
  another stream is done by then: between lanes tensors pass through the round's end only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch


class Lane(Enum):
    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


class Lanes(Protocol):
    @property
    def are_apart(self) -> bool:
        """Whether work on one may run beside work on another; else a round is best one pass."""
        ...

    def round(self) -> AbstractContextManager[None]:
        """What is queued after it comes after all that lanes were given in it, errors or not."""
        ...

    def on(self, lane: Lane, *after: Lane) -> AbstractContextManager[None]:
        """Work inside goes to the lane: after that of the main stream, and of `after`, so far. Only
        inside a round."""
        ...


class OneLane:
    """Where there are no streams: everything runs where it stands."""

    are_apart = False

    def round(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on(self, lane: Lane, *after: Lane) -> AbstractContextManager[None]:
        return nullcontext()


class Stream(Protocol):
    """Of `torch.cuda.Stream`, what lanes need."""

    def wait_stream(self, stream: Any) -> None:
        """What is queued here from now on comes after what is queued there so far."""
        ...


class StreamLanes:
    """current: the stream that work goes to. use: makes it another one for a while."""

    are_apart = True

    def __init__(
        self,
        streams: Mapping[Lane, Stream],
        current: Callable[[], Stream],
        use: Callable[[Any], AbstractContextManager[Any]],
    ):
        self._streams, self._current, self._use = dict(streams), current, use
        self._main: Stream | None = None  # of the round underway
        self._used: dict[Lane, None] = {}  # in it

    @contextmanager
    def round(self) -> Iterator[None]:
        self._main = self._current()
        try:
            yield
        finally:
            for lane in self._used:
                self._main.wait_stream(self._streams[lane])
            self._used.clear()
            self._main = None

    @contextmanager
    def on(self, lane: Lane, *after: Lane) -> Iterator[None]:
        assert self._main is not None, "a lane outside of a round"
        stream = self._streams[lane]
        self._used[lane] = None  # also where what follows fails: some of it may be queued
        stream.wait_stream(self._main)
        for other in after:
            stream.wait_stream(self._streams[other])
        with self._use(stream):
            yield


def lanes_for(device: torch.device) -> Lanes:
    """On a GPU drafts and verification go before prefill where both want the same unit: samples
    wait for them, and prefill fills what they leave."""
    if device.type != "cuda":
        return OneLane()
    priorities = {Lane.PREFILL: 0, Lane.DRAFT: -1, Lane.VERIFY: -1}
    streams = {lane: torch.cuda.Stream(device, priority) for lane, priority in priorities.items()}
    return StreamLanes(streams, partial(torch.cuda.current_stream, device), torch.cuda.stream)
