"""The sampling engine: continuous batching of prompts and samples, a step at a time.

The scheduler decides what a step computes, runners compute it, the postprocessor draws tokens.
Every mutable thing has one owner, and all owners run on the worker thread that calls `step`, so
there are no locks. Seeded results do not depend on other requests: see `runners`.
"""

import time
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tinkercloud.core.types import OnTokens, SampleRequest
from tinkercloud.decoding.stops import StopRule
from tinkercloud.embedded.forward.batch import ragged
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.base_states import BaseState, BaseStates, Speculate
from tinkercloud.embedded.sampling.batch_plan import BatchItem, LaunchedPass
from tinkercloud.embedded.sampling.cuda_streams import (
    SingleStream,
    StreamRole,
    Streams,
    streams_for,
)
from tinkercloud.embedded.sampling.grammar_queue import GrammarQueue
from tinkercloud.embedded.sampling.postprocessor import Postprocessor
from tinkercloud.embedded.sampling.prompt_logprobs import PromptScores
from tinkercloud.embedded.sampling.scheduler import Scheduler
from tinkercloud.embedded.sampling.sequences import Job, Reply, Sequence
from tinkercloud.errors import UserError


class SamplingEngine:
    """submit() requests, call step() while busy; replies come from inside step().

    scheduler and states: for those who look, not for those who change.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        kv_cache_bytes: int,
        num_threads: int = 1,
        depth: float = 1.2,
        speculate: Speculate | None = None,
    ):
        """depth: no prompts are begun while more than depth x max_batch samples are ready or run,
        so that prefill does not starve them."""
        self.states = BaseStates(kv_cache_bytes, num_threads, speculate)
        self.scheduler = Scheduler(
            max_batch, depth * max_batch, self.states.cache_of, self.states.discard
        )
        self._postprocessor = Postprocessor(self.states, self.scheduler)
        self._grammars = GrammarQueue(self.scheduler.add)
        self._streams: Streams | None = None  # of the bases' device; None: there is no base yet

    @property
    def busy(self) -> bool:
        return self.scheduler.is_busy or bool(self._grammars)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._grammars) + self.scheduler.num_waiting

    @property
    def num_preempted(self) -> int:
        return self.scheduler.num_preempted

    @property
    def num_kv_blocks(self) -> int:
        """Of all bases that were opened."""
        return sum(state.cache.pool.num_blocks for state in self.states)

    @property
    def num_kv_blocks_held(self) -> int:
        """By samples; the rest is unused, or keeps beginnings of prompts until it is needed."""
        pools = [state.cache.pool for state in self.states]
        return sum(pool.num_blocks - pool.num_available for pool in pools)

    @property
    def num_tokens_sampled(self) -> int:
        return self._postprocessor.num_drawn - self.scheduler.num_discarded

    def speculation(self) -> tuple[dict[str, Any], list[str]]:
        """Speculation's counters by base model, and the first one's as lines for Prometheus."""
        snapshots: dict[str, Any] = {}
        lines: list[str] = []
        for state in self.states:
            if state.speculation is not None:
                snapshots[state.base.name] = state.speculation.snapshot()
                lines = lines or state.speculation.lines()
        return snapshots, lines

    def submit(
        self,
        version: Version,
        request: SampleRequest,
        reply: Reply,
        on_tokens: OnTokens | None = None,
    ) -> Job:
        """on_tokens: is called inside step(), with the tokens that it drew. Returns what `cancel`
        takes."""
        if self._streams is None:
            self._streams = streams_for(version.base.device)
        self.states.open(version.base)
        scores = None
        if request.scores_prompt:
            runner = self.states[version.base].runner
            scores = PromptScores(request, runner.norms, fuses=runner.fuses_lm_head)
        rule = StopRule(request.params, version.base.config.eos_token_ids, version.base.decoder)
        job = Job(version, request, reply, scores, rule, on_tokens)
        (self.scheduler if request.grammar is None else self._grammars).add(job)
        return job

    def cancel(self, job: Job) -> None:
        """End an unfinished request between steps, without its samples; its blocks are free. The
        samples of others do not change: they do not depend on who shares their passes."""
        self._end(job, UserError("the request was cancelled"))
        if not self.busy:
            self.states.rest()

    def _end(self, job: Job, error: BaseException) -> None:
        self._grammars.drop(job)
        self.scheduler.drop(job)
        job.fail(error)

    def use_streams(self, streams: Streams) -> None:
        """Others than the device's own; between steps."""
        self._streams = streams

    def yield_to(self, who_trains: Callable[[], Set[str]]) -> None:
        """who_trains: users whose training waits for the end of a step, or may come to. From now on
        steps are short for them, where samples are not all their own."""
        self.scheduler.who_trains = who_trains

    def forget(self, version_id: str) -> None:
        """Drop what is cached of a released version; its unfinished samples go on."""
        self.states.forget(version_id)

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule, run, postprocess, begin samples: a pass for each set of base weights, and a
        token or more for each sample."""
        if self._grammars:
            self._grammars.poll(is_idle=not self.scheduler.is_busy)
        began = time.perf_counter()
        streams = self._streams or SingleStream()
        items = [self._with_callers_draft(item) for item in self.scheduler.schedule()]
        with streams.fork_join():
            batches = self._run(items, streams)
        ms = 1e3 * (time.perf_counter() - began)
        self.scheduler.took(ms)
        self._end_round(ms, batches)
        self._postprocessor.begin(self.scheduler.begin_samples())
        for job in self._postprocessor.take_failed():
            assert job.error is not None
            self._end(job, job.error)
        if not self.busy:
            self.states.rest()

    def fail_all(self, error: BaseException) -> None:
        """Answer every unfinished request with `error`, and drop it."""
        jobs = [*self.scheduler.clear(), *self._grammars.clear()]
        self.states.close()
        for job in jobs:
            job.fail(error)

    # ---- passes

    def _run(self, items: list[BatchItem], streams: Streams) -> list[list[BatchItem]]:
        """A pass for each batch, and what follows from it; returns the batches.

        Where streams are parallel, prompts (and samples that compute their keys and values again)
        are launched first and processed last, so that the others draft and verify meanwhile. Else
        one pass for everything reads the weights only once.
        """
        prefill = [item for item in items if item.count > 1] if streams.are_parallel else []
        decode = [item for item in items if item.count == 1] if streams.are_parallel else items
        prefill_batches = self._batches(prefill)
        launched: list[LaunchedPass] = []
        for batch in prefill_batches:
            with streams.on(StreamRole.PREFILL):
                launched.append(self._launch(batch))
        decode_batches = self._batches(self._with_drafts(decode, streams))
        for batch in decode_batches:
            with streams.on(StreamRole.VERIFY, StreamRole.DRAFT):
                # Before the next launch: a runner may give the next logits the same memory.
                self._postprocessor.process(self._launch(batch))
        for each in launched:
            with streams.on(StreamRole.PREFILL, StreamRole.DRAFT, StreamRole.VERIFY):
                self._postprocessor.process(each)
        return [*prefill_batches, *decode_batches]

    def _batches(self, items: Iterable[BatchItem]) -> list[list[BatchItem]]:
        """By weights; rows of one adapter are neighbours."""
        batches: dict[int, list[BatchItem]] = {}
        for item in items:
            batches.setdefault(id(item.version.weights), []).append(item)
        return [sorted(batch, key=lambda item: item.version.id) for batch in batches.values()]

    def _launch(self, batch: list[BatchItem]) -> LaunchedPass:
        state = self.states[batch[0].base]
        runner = state.runner
        if runner.fuses_lm_head:
            batch = [_with_fused_draw(item, state) for item in batch]
        logits = runner.forward(ragged([item.rows for item in batch]), state.cache.pool)
        hidden = _hidden_states(state)
        return LaunchedPass(batch, logits, hidden, runner.scores, runner.candidates)

    # ---- drafts

    def _with_callers_draft(self, item: BatchItem) -> BatchItem:
        """The last pass over a prompt verifies what its caller drafted behind it. Where there are
        no blocks for that, the sample is decoded as any other."""
        drafted = item.sequence.job.drafted if item.sequence.is_prompt and item.ends else ()
        if drafted and self.scheduler.reserve_draft(item.sequence, len(drafted)):
            return replace(item, drafted=drafted)
        return item

    def _with_drafts(self, items: list[BatchItem], streams: Streams) -> list[BatchItem]:
        """Samples that wait for one token may get drafted ones to verify in the same pass."""
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for state in self.states:
            samples = [i.sequence for i in items if i.is_decode and i.base is state.base]
            if state.speculation is not None and samples:
                with streams.on(StreamRole.DRAFT):
                    proposals = state.speculation.propose(samples)
                drafts |= zip(samples, proposals, strict=True)
        return [self._with_draft(item, drafts.get(item.sequence, ())) for item in items]

    def _with_draft(self, item: BatchItem, drafted: tuple[int, ...]) -> BatchItem:
        if not drafted:
            return item
        if self.scheduler.reserve_draft(item.sequence, len(drafted)):
            return replace(item, drafted=drafted)
        speculation = self.states[item.base].speculation
        assert speculation is not None, "a draft without a drafter"
        speculation.drop_draft(item.sequence)
        return item

    def _end_round(self, ms: float, batches: list[list[BatchItem]]) -> None:
        """Report the step's time to speculation: it is a round's own where nothing but the round
        was computed."""
        usable = len(batches) == 1 and all(item.is_decode for item in batches[0])
        for state in self.states:
            if state.speculation is not None:
                state.speculation.end_round(ms, usable=usable)


def _with_fused_draw(item: BatchItem, state: BaseState) -> BatchItem:
    """The pass draws what comes next, where nothing else asks for logits."""
    sequence = item.sequence
    if not item.is_decode or not sequence.job.draws_whole or sequence.needs_logits:
        return item
    drawn_with = tuple(sequence.row_params(place) for place in range(1 + len(item.drafted)))
    speculation = state.speculation if item.drafted else None
    keeps_logits = speculation is not None and speculation.reads_distributions(sequence)
    return replace(item, drawn_with=drawn_with, keeps_logits=keeps_logits)


def _hidden_states(state: BaseState) -> Tensor | None:
    """Hidden states (M, L, D) of the runner's last pass, where the base's drafter reads them."""
    reads = state.speculation is not None and state.speculation.layers
    return state.runner.captured if reads else None
