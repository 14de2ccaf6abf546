"""CUDA streams of one engine step: prefill runs in parallel with drafting and verification.

    main     --+------------------------------------------+-- samples begin
    PREFILL    +-- pass over prompts --------- its logits --+
    DRAFT      +-- drafts --+                  |            |
    VERIFY                  +-- pass, draw ----+------------+

Work on a stream begins after what was queued so far on the main stream and on the streams it is
ordered after; at the end of the step the main stream waits for all of them. So prefill's pass is
all that may overlap with other work, and that is without a race:

- Keys and values. A pass writes to blocks that its sequence alone holds. The other blocks it reads
  were written in an earlier step: blocks are shared once they are full and registered by digest;
  they are registered where a pass's results are processed, and looked up before the first pass of
  a step. A sequence that needs a block which this step computes waits (`Scheduler`) and holds none
  of it. Blocks that are freed while a pass runs are not read by it, since its sequences hold
  theirs.
- CUDA graphs, their one memory pool and their buffers. Prefill's pass has several rows of each
  sequence, which graphs never serve; drafts, verification and draws from prefill's logits are
  ordered one after the other.
- Memory. The allocator reuses freed memory for the next work on the same stream. Work on other
  streams that used it is done by then: tensors pass from stream to stream at the end of a step
  only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch


class StreamRole(Enum):
    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


class Streams(Protocol):
    @property
    def are_parallel(self) -> bool:
        """Whether work on one may overlap with work on another; else a step is best one pass."""
        ...

    def fork_join(self) -> AbstractContextManager[None]:
        """Work queued after the block comes after all work queued on the streams inside it, also
        when the block raises."""
        ...

    def on(self, role: StreamRole, *after: StreamRole) -> AbstractContextManager[None]:
        """Work inside goes to the role's stream: after the work queued so far on the main stream
        and on the streams of `after`. Only inside `fork_join`."""
        ...


class SingleStream:
    """For devices without streams: all work runs in the order in which it is queued."""

    are_parallel = False

    def fork_join(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on(self, role: StreamRole, *after: StreamRole) -> AbstractContextManager[None]:
        return nullcontext()


class Stream(Protocol):
    """The part of `torch.cuda.Stream` that is needed here."""

    def wait_stream(self, stream: Any) -> None:
        """Work queued here from now on comes after all work queued there so far."""
        ...


class ParallelStreams:
    """A stream for each role. current: returns the stream that work goes to. use: makes another
    stream the current one inside a block."""

    are_parallel = True

    def __init__(
        self,
        streams: Mapping[StreamRole, Stream],
        current: Callable[[], Stream],
        use: Callable[[Any], AbstractContextManager[Any]],
    ):
        self._streams, self._current, self._use = dict(streams), current, use
        self._main: Stream | None = None  # while a step runs
        self._used: dict[StreamRole, None] = {}  # in this step

    @contextmanager
    def fork_join(self) -> Iterator[None]:
        self._main = self._current()
        try:
            yield
        finally:
            for role in self._used:
                self._main.wait_stream(self._streams[role])
            self._used.clear()
            self._main = None

    @contextmanager
    def on(self, role: StreamRole, *after: StreamRole) -> Iterator[None]:
        assert self._main is not None, "a stream is used outside of fork_join"
        stream = self._streams[role]
        self._used[role] = None  # before anything can fail: part of the work may be queued then
        stream.wait_stream(self._main)
        for earlier in after:
            stream.wait_stream(self._streams[earlier])
        with self._use(stream):
            yield


def streams_for(device: torch.device) -> Streams:
    """On a GPU drafts and verification have priority over prefill where both want the same unit:
    samples wait for them, and prefill fills the units that they leave idle."""
    if device.type != "cuda":
        return SingleStream()
    priorities = {StreamRole.PREFILL: 0, StreamRole.DRAFT: -1, StreamRole.VERIFY: -1}
    streams = {role: torch.cuda.Stream(device, priority) for role, priority in priorities.items()}
    return ParallelStreams(streams, partial(torch.cuda.current_stream, device), torch.cuda.stream)
