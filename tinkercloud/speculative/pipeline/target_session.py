"""A session at a target worker. It outlives connections: it is opened again with its tokens."""

import threading
from collections.abc import Sequence

from tinkercloud.core.types import SamplingParams
from tinkercloud.speculative.remote import target_pb2 as pb
from tinkercloud.speculative.remote.target_connection import (
    SessionGone,
    TargetConnection,
    TargetGone,
    TargetStream,
)
from tinkercloud.speculative.remote.trees import tree_of


class TargetSession:
    """tokens: the prompt, and what the target said; to be extended between rounds by what others
    say. reconnect_s: for how long a target that is gone is tried again."""

    def __init__(self, target: TargetConnection, params: SamplingParams, reconnect_s: float):
        self.tokens: list[int] = []
        self.params = params
        self._target, self._reconnect_s = target, reconnect_s
        self._place: tuple[int, TargetStream] | None = None
        self._num_sent = 0
        self._round = 0

    def verify(
        self, chains: Sequence[Sequence[int]], max_tokens: int, stop: threading.Event
    ) -> pb.Verdict:
        """chains: drafts; without any the target samples up to max_tokens. The verdict's tokens
        become the session's. Noise is keyed by place, so that a session which had to be opened
        again goes on as if nothing had been. Raises TargetGone, Stopped, UserError."""
        tokens, parents = tree_of(chains)
        has_been_retried = False
        while True:
            try:
                number, stream = self._opened()
                self._round += 1
                verdict = self._target.verify(
                    stream,
                    pb.Verify(
                        id=number, number=self._round, length=len(self.tokens),
                        tokens=self.tokens[self._num_sent :], drafted=tokens,
                        parents=parents if len(chains) > 1 else (), max_tokens=max_tokens,
                    ),
                    stop,
                )  # fmt: skip
                break
            except SessionGone:
                self.end()
            except TargetGone:
                self.end()
                if has_been_retried:
                    raise
                self._target.connect(self._reconnect_s)
                has_been_retried = True
            except BaseException:  # Ctrl-C too: what the target verified is unknown
                self.end()
                raise
        self.tokens.extend(verdict.tokens)
        self._num_sent = len(self.tokens)
        return verdict

    def end(self) -> None:
        """At the worker; the next round opens it again. Can be called again."""
        place, self._place = self._place, None
        if place is not None:
            self._target.end(*place)

    def _opened(self) -> tuple[int, TargetStream]:
        """Raises TargetGone."""
        if self._place is None:
            self._place = self._target.open(self.params)
            self._num_sent = 0
        return self._place
