"""Rounds of drafts and verdicts, until the output ends."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.pipeline.options import PipelineOptions
from tinkercloud.speculative.pipeline.result import PipelineResult, Round
from tinkercloud.speculative.pipeline.target_session import TargetSession
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter

OnRound = Callable[[Round], None]
T = TypeVar("T")


@dataclass(slots=True)
class Writer:
    """One text being written: a session at the target, and its like at the drafters. stream:
    shares the session's tokens; None: nobody drafts."""

    session: TargetSession
    drafter: RemoteDrafter | None
    stream: Stream | None

    def append(self, tokens: list[int]) -> None:
        """Of a prompt, or of what is said next to it."""
        self.session.tokens.extend(tokens)
        self._observe(len(tokens))

    def chains(self, most: int, branches: int) -> list[tuple[int, ...]]:
        """Drafts of the next tokens; [] where there are none in time."""
        if self.drafter is None or self.stream is None or most < 1:
            return []
        if branches > 1:
            return self.drafter.branches(self.stream, most, branches)
        draft = self.drafter.propose([(self.stream, most)])[0]
        return [draft.tokens] if draft.tokens else []

    def verify(
        self, chains: list[tuple[int, ...]], max_tokens: int, stop: threading.Event
    ) -> tuple[Round, bool]:
        """The round, without its times, and whether the text ends with it."""
        verdict = self.session.verify(chains, max_tokens, stop)
        self._observe(len(verdict.tokens))
        depth = max(map(len, chains), default=0)
        nodes = len({chain[:place] for chain in chains for place in range(1, len(chain) + 1)})
        verified = Round(
            nodes, depth, verdict.num_accepted, tuple(verdict.tokens), tuple(verdict.logprobs),
            verdict.num_cached, False, 0.0, 0.0, 0.0,
        )  # fmt: skip
        return verified, verdict.has_stopped

    def end(self) -> None:
        """At the target and at the drafters; can be called again."""
        self.session.end()
        if self.drafter is not None and self.stream is not None:
            self.drafter.end(self.stream)
            self.stream = None

    def _observe(self, num_new: int) -> None:
        if self.drafter is not None and self.stream is not None:
            self.drafter.observe(self.stream, num_new)


def run_speculative_loop(
    writer: Writer,
    result: PipelineResult,
    options: PipelineOptions,
    stop: threading.Event,
    on_round: OnRound | None = None,
) -> PipelineResult:
    """Fills the result. The output depends on prompt, parameters and seed alone; drafts change how
    long it takes. Raises TargetGone, Stopped, UserError."""
    for each in _rounds(writer, result, options, stop):
        result.rounds.append(each)
        if on_round is not None:
            on_round(each)
    return result


async def run_speculative_loop_async(
    writer: Writer,
    result: PipelineResult,
    options: PipelineOptions,
    on_round: OnRound | None = None,
) -> PipelineResult:
    """As `run_speculative_loop`, without blocking the event loop. on_round: is called in another
    thread. When it is cancelled, what the target is computing is cancelled too."""
    return await in_thread(
        lambda stop: run_speculative_loop(writer, result, options, stop, on_round)
    )


async def in_thread(work_until: Callable[[threading.Event], T]) -> T:
    """What it yields. When the caller is cancelled the event is set, and the thread waited for: it
    has cleaned up then."""
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(work_until, stop))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise


def _rounds(
    writer: Writer, result: PipelineResult, options: PipelineOptions, stop: threading.Event
) -> Iterator[Round]:
    began_s = time.monotonic()
    num_left = options.max_tokens
    try:
        while num_left > 0 and not result.finish_reason:
            if options.max_rounds is not None and len(result.rounds) >= options.max_rounds:
                result.finish_reason = "rounds"
                break
            asked_s = time.monotonic()
            before = _num_prepared(writer)
            chains = writer.chains(min(options.drafted, num_left - 1), options.branches)
            drafted_s = time.monotonic()
            verified, has_stopped = writer.verify(chains, min(options.undrafted, num_left), stop)
            num_left -= len(verified.tokens)
            if has_stopped:
                result.finish_reason = "stop"
            elif num_left <= 0:
                result.finish_reason = "length"
            yield replace(
                verified,
                prepared=_num_prepared(writer) > before,
                began_s=asked_s - began_s,
                draft_s=drafted_s - asked_s,
                verify_s=time.monotonic() - drafted_s,
            )
    finally:
        result.wall_s = time.monotonic() - began_s


def _num_prepared(writer: Writer) -> int:
    return 0 if writer.drafter is None else writer.drafter.counts["prepared"]
