"""The sampling engine: each step is one ragged batch of prompt chunks and next tokens.

A sequence is tokens of which some have their keys and values in blocks; a step brings it as many
forward as the budget allows, and where it reaches the end, the next token is drawn. So a prompt, a
sequence being decoded, and one that lost its blocks and takes them up again are the same thing.

Every mutable thing here has one owner, the worker thread that calls `step`. Seeded results do not
depend on other requests: see `runners`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinkercloud.core.types import SampleRequest
from tinkercloud.decoding.sampler import Drawn, sample, topk_rows
from tinkercloud.decoding.stops import StopRule
from tinkercloud.embedded.forward.batch import ragged
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner, runner_for, scorer_for
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.batch_plan import BatchItem, DrawnRows, LaunchedPass
from tinkercloud.embedded.sampling.cuda_streams import (
    SingleStream,
    StreamRole,
    Streams,
    streams_for,
)
from tinkercloud.embedded.sampling.prompt_logprobs import PromptScores
from tinkercloud.embedded.sampling.sequences import Job, Reply, Sequence
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.errors import ServerFault
from tinkercloud.speculative.verify import match

CHUNK = 512
"""Rows of one prompt in one step. Where a runner is not exact, prompts are cut at its multiples:
a cut that moved with the load would change the last bits of keys and values."""
SCORED_CHUNK = 128  # rows that all want their [rows, V] logits
PREFILL_ROWS = 1024  # of all prompts in one step, about
SEEN_ROWS = 64  # of a prompt's end that a drafter sees


@dataclass(slots=True)
class _BaseState:
    """What the versions of one base share."""

    base: BaseModel
    pool: BlockPool
    runner: Runner
    scorer: Runner  # of prompts whose log-probabilities are wanted; may be the runner
    speculation: Speculation | None


Speculate = Callable[[BaseModel, Runner, BlockPool], Speculation | None]
"""Makes what drafts for the samples of a base; None: nothing does."""


class SamplingEngine:
    """submit() requests, call step() while busy; replies come from inside step()."""

    def __init__(
        self,
        *,
        max_batch: int,
        kv_cache_bytes: int,
        num_threads: int = 1,
        depth: float = 1.2,
        speculate: Speculate | None = None,
    ):
        """depth: no prompts are begun while more than depth x max_batch samples wait for their
        turn or are decoded, so that prefill does not starve them."""
        self._speculate = speculate
        self._max_batch, self._most_begun = max_batch, depth * max_batch
        self._kv_cache_bytes = kv_cache_bytes
        self._num_threads = num_threads
        self._waiting: deque[Job] = deque()  # their prompts are not done
        self._ready: deque[Job] = deque()  # samples to begin
        self._running: list[Sequence] = []  # in the order they were admitted
        self._devices: dict[int, _BaseState] = {}  # by base
        self._runner: Runner | None = None  # all bases have one device and number type
        self._streams: Streams | None = None  # of that device; None: nothing came yet
        self.num_tokens_sampled = 0
        self.num_preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._ready or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._ready)

    def speculation(self) -> tuple[dict[str, Any], list[str]]:
        """What drafts do, by base model, and lines of the first one's for Prometheus."""
        told, lines = {}, list[str]()
        for device in self._devices.values():
            if device.speculation is not None:
                told[device.base.name] = device.speculation.snapshot()
                lines = lines or device.speculation.lines()
        return told, lines

    def submit(self, version: Version, request: SampleRequest, reply: Reply) -> None:
        scores = PromptScores(request) if PromptScores.wanted(request) else None
        rule = StopRule(request.params, version.base.config.eos_token_ids, version.base.decoder)
        self._waiting.append(Job(version, request, reply, scores, rule))
        if self._streams is None:
            self._streams = streams_for(version.base.device)

    def use_streams(self, streams: Streams) -> None:
        """Between rounds: others than the device's own."""
        self._streams = streams

    def forget(self, version_id: str) -> None:
        """Drop what is kept of a released version; samples underway finish."""
        for device in self._devices.values():
            device.pool.forget(version_id)
            if device.speculation is not None:
                device.speculation.forget(version_id)

    @torch.inference_mode()
    def step(self) -> None:
        """One round: a forward pass for each set of base weights, then one token per sequence."""
        began = time.perf_counter()
        streams = self._streams or SingleStream()
        with streams.fork_join():
            groups = (
                self._side_by_side(streams) if streams.are_parallel else self._together(streams)
            )
        alone = len(groups) == 1 and all(one.is_decode for one in groups[0])
        self._end_round(1e3 * (time.perf_counter() - began), alone=alone)
        self._admit()
        if not self.busy and self._runner is not None:
            self._runner.rest()

    def fail_all(self, error: BaseException) -> None:
        """Answer everything underway with `error` and drop it."""
        jobs = {id(j): j for j in (*self._waiting, *self._ready)}
        jobs |= {id(s.job): s.job for s in self._running}
        for device in self._devices.values():
            if device.speculation is not None:
                device.speculation.end_all()
        self._waiting.clear()
        self._ready.clear()
        self._running.clear()
        self._devices.clear()
        if self._runner is not None:
            self._runner.rest()
        for job in jobs.values():
            job.reply(error)

    # ---- what the next pass computes

    def _decode_work(self) -> list[BatchItem]:
        work: list[BatchItem] = []
        budget = PREFILL_ROWS  # of sequences that take up their blocks again
        for sequence in list(self._running):
            device = self._device(sequence.job.version.base)
            if not sequence.blocks:
                if not self._has_room(sequence.job, len(sequence.tokens)):
                    continue
                if device.runner.is_exact:
                    sequence.look_up(device.pool)
            count = self._chunk(sequence, CHUNK) if sequence.num_pending > 1 else 1
            if count > 1 and budget < count:
                continue
            if self._reserve(sequence, sequence.done + count):
                work.append(BatchItem(sequence, count))
                budget -= count if count > 1 else 0
        return work

    def _with_drafts(self, work: list[BatchItem], streams: Streams) -> list[BatchItem]:
        """Samples that wait for one token may get more in this pass."""
        drafted: dict[Sequence, tuple[int, ...]] = {}
        for device in self._devices.values():
            if device.speculation is None:
                continue
            own = [w for w in work if w.is_decode and self._device(w.version.base) is device]
            if not own:
                continue
            samples = [one.sequence for one in own]
            with streams.on(StreamRole.DRAFT):
                drafts = device.speculation.propose(samples)
            for one, tokens in zip(samples, drafts, strict=True):
                if not tokens:
                    continue
                if one.reserve(device.pool, len(one.tokens) + len(tokens)):
                    drafted[one] = tokens
                else:
                    device.speculation.cut(one)
        if not drafted:
            return work
        return [replace(one, drafted=drafted.get(one.sequence, ())) for one in work]

    def _end_round(self, ms: float, *, alone: bool) -> None:
        for device in self._devices.values():
            if device.speculation is not None:
                device.speculation.round_over(ms, usable=alone)

    def _prefill_work(self) -> list[BatchItem]:
        work: list[BatchItem] = []
        rows, begun = 0, self.num_running + sum(job.num_left for job in self._ready)
        underway: set[bytes] = set()
        for job in list(self._waiting):
            if rows >= PREFILL_ROWS or begun > self._most_begun:
                break
            sequence = job.prompt
            device = self._device(job.version.base)
            if not sequence.blocks and not self._look_up(job, device, underway):
                continue  # another one is computing its beginning
            count = self._chunk(sequence, SCORED_CHUNK if job.is_scoring else CHUNK)
            if not sequence.reserve(device.pool, sequence.done + count):
                if work or self._running or self._ready:
                    break
                if not self._reserve(sequence, sequence.done + count):
                    break
            underway.update(sequence.digests[sequence.done // BLOCK_TOKENS :])
            work.append(BatchItem(sequence, count))
            rows += count
            begun += job.num_left
        return work

    def _look_up(self, job: Job, device: _BaseState, underway: set[bytes]) -> bool:
        """Take over what is known of a prompt; False: what it needs next is being computed."""
        sequence = job.prompt
        if job.is_scoring or not device.runner.is_exact:
            return True
        job.cache_hit_tokens = sequence.look_up(device.pool)
        following = sequence.digests[len(sequence.blocks) :]
        if following and following[0] in underway:
            sequence.drop_blocks(device.pool)
            return False
        return True

    @staticmethod
    def _chunk(sequence: Sequence, limit: int) -> int:
        """Tokens up to the next cut."""
        return min(sequence.num_pending, limit - sequence.done % limit)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for that many tokens, of younger ones if need be. False: not now, or never."""
        base = sequence.job.version.base
        pool = self._device(base).pool
        while not sequence.reserve(pool, num_tokens):
            if self._take_back(base, sequence):
                continue
            if any(s.blocks for s in self._holders(base) if s is not sequence):
                if sequence.blocks:
                    self._preempt(sequence)
            else:
                self._fail(sequence.job, blocks_for(num_tokens), pool)
            return False
        return True

    def _has_room(self, job: Job, num_tokens: int) -> bool:
        """Whether a sample that has so many tokens can hope to reach its end. Beginning one that
        cannot would only take from others what they then take back."""
        base = job.version.base
        pool = self._device(base).pool
        others = sum(bool(s.blocks) for s in self._running if s.job.version.base is base)
        growth = min(job.num_prompt + job.max_tokens - num_tokens, CHUNK)
        own = 0 if job.prompt.blocks else num_tokens
        return not others or pool.num_available >= others + blocks_for(own + growth)

    def _take_back(self, base: BaseModel, needed_by: Sequence) -> bool:
        """Free the blocks of one that has any: a prompt, or a sample younger than needed_by."""
        pool = self._device(base).pool
        for job in (*reversed(self._waiting), *reversed(self._ready)):
            if job.version.base is base and job.prompt.blocks and job.prompt is not needed_by:
                job.prompt.drop_blocks(pool)
                if job in self._ready:
                    self._ready.remove(job)
                    self._waiting.appendleft(job)
                return True
        for sequence in reversed(self._running):
            if sequence is needed_by:
                return False
            if sequence.job.version.base is base and sequence.blocks:
                self._preempt(sequence)
                return True
        return False

    def _holders(self, base: BaseModel) -> list[Sequence]:
        prompts = [job.prompt for job in (*self._waiting, *self._ready)]
        return [s for s in (*prompts, *self._running) if s.job.version.base is base]

    def _preempt(self, sequence: Sequence) -> None:
        """It stays where it is in the line, and computes its keys and values again."""
        device = self._device(sequence.job.version.base)
        self.num_preempted += 1
        sequence.drop_blocks(device.pool)
        if not device.runner.is_exact:
            self.num_tokens_sampled -= len(sequence.logprobs)
            if device.speculation is not None:
                device.speculation.end(sequence)
            sequence.start_over(sequence.job.num_prompt)

    def _fail(self, job: Job, num_blocks: int, pool: BlockPool) -> None:
        for queue in (self._waiting, self._ready):
            if job in queue:
                queue.remove(job)
        speculation = self._device(job.version.base).speculation
        for sequence in [s for s in (job.prompt, *self._running) if s.job is job]:
            sequence.drop_blocks(pool)
            if speculation is not None:
                speculation.end(sequence)
        self._running = [s for s in self._running if s.job is not job]
        job.reply(
            ServerFault(
                f"a sequence needs {num_blocks} blocks of keys and values and there are "
                f"{pool.num_blocks}; raise engine.kv_cache_bytes"
            )
        )

    def _device(self, base: BaseModel) -> _BaseState:
        if id(base) not in self._devices:
            per_block = BlockPool.bytes_per_block(base.config, base.dtype)
            num_blocks = self._kv_cache_bytes // per_block
            if base.device.type == "cpu":  # memory is used as blocks are: room for one at least
                whole = blocks_for(base.config.max_position_embeddings) + 1
                num_blocks = max(num_blocks, whole)
            pool = BlockPool(base.config, base.dtype, base.device, num_blocks)
            if self._runner is None:
                self._runner = runner_for(base, self._num_threads)
            scorer = scorer_for(base, self._runner)
            speculation = None
            if self._speculate is not None:
                with torch.inference_mode(False):  # what it trains is no tensor of a forward pass
                    speculation = self._speculate(base, self._runner, pool)
            self._devices[id(base)] = _BaseState(base, pool, self._runner, scorer, speculation)
        return self._devices[id(base)]

    def _runner_of(self, work: BatchItem) -> Runner:
        device = self._device(work.version.base)
        return device.scorer if work.all_rows else device.runner

    # ---- a pass and what follows from it

    def _together(self, streams: Streams) -> list[list[BatchItem]]:
        """Everything in one ragged pass for each set of weights."""
        work = [*self._with_drafts(self._decode_work(), streams), *self._prefill_work()]
        groups = self._groups(work)
        for group in groups:
            self._take(self._launched(group))
        return groups

    def _side_by_side(self, streams: Streams) -> list[list[BatchItem]]:
        """Whoever has several tokens to read does so while the others draft and verify. Each role's
        results are taken on it; what was launched first comes last."""
        work = [*self._decode_work(), *self._prefill_work()]
        ahead = self._groups([one for one in work if one.count > 1])
        launched: list[LaunchedPass] = []
        for group in ahead:
            with streams.on(StreamRole.PREFILL):
                launched.append(self._launched(group))
        single = [one for one in work if one.count == 1]
        beside = self._groups(self._with_drafts(single, streams))
        for group in beside:
            with streams.on(StreamRole.VERIFY, StreamRole.DRAFT):
                self._take(self._launched(group))
        for one in launched:
            with streams.on(StreamRole.PREFILL, StreamRole.DRAFT, StreamRole.VERIFY):
                self._take(one)
        return [*ahead, *beside]

    def _groups(self, work: Iterable[BatchItem]) -> list[list[BatchItem]]:
        """By weights and runner; rows of one adapter are neighbours."""
        groups: dict[tuple[int, int], list[BatchItem]] = {}
        for one in work:
            runner = self._runner_of(one)
            groups.setdefault((id(one.version.weights), id(runner)), []).append(one)
        return [sorted(group, key=lambda one: one.version.id) for group in groups.values()]

    def _launched(self, group: list[BatchItem]) -> LaunchedPass:
        device = self._device(group[0].version.base)
        batch = ragged([one.part for one in group])
        logits = self._runner_of(group[0]).forward(batch, device.pool)
        return LaunchedPass(group, logits, self._captured(group[0], device))

    def _take(self, launched: LaunchedPass) -> None:
        """What follows from a pass."""
        logits, hidden = launched.logits, launched.hidden
        drawing: list[DrawnRows] = []
        rows: list[int] = []  # of logits, of those in `drawing`
        at = row = 0
        for one in launched.works:
            own, at = logits[at : at + one.num_wanted], at + one.num_wanted
            row += one.num_rows
            seen = None if hidden is None else hidden[row - one.num_wanted : row]
            if hidden is not None and one.ends and one.sequence.index < 0:
                last = hidden[max(row - one.count, row - SEEN_ROWS) : row]
                one.sequence.job.hidden = last.clone()
            if self._after(one, own, self._device(one.version.base)):
                turn = DrawnRows(one.sequence, len(rows), one.drafted, seen)
                drawing.append(turn)
                rows += range(at - len(turn.rows), at)
        if drawing:
            self._draw(drawing, logits if len(rows) == len(logits) else logits[rows])

    def _captured(self, work: BatchItem, device: _BaseState) -> Tensor | None:
        """What the drafter wants to see of the pass (M, L, D)."""
        wanted = device.speculation is not None and device.speculation.layers
        runner = self._runner_of(work)
        return runner.captured if wanted and runner is device.runner else None

    def _after(self, one: BatchItem, logits: Tensor, device: _BaseState) -> bool:
        """Whether a token is to be drawn from the last row."""
        sequence, job, ends = one.sequence, one.sequence.job, one.ends
        if one.all_rows and job.scores is not None:
            job.scores.add(sequence.done, logits)
        apart = one.all_rows and device.scorer is not device.runner
        sequence.advance(device.pool, one.count, named=device.runner.is_exact and not apart)
        if not ends:
            return False
        if sequence.index >= 0:
            return True
        job.is_scoring = False
        if apart:  # samples go on from the runner's own keys and values, as without scores
            sequence.drop_blocks(device.pool)
            return False
        job.logits = logits[-1].clone()
        self._waiting.remove(job)
        self._ready.append(job)
        return False

    def _admit(self) -> None:
        """Begin samples of prompts that are done, as far as the batch and the blocks go."""
        begun: list[Sequence] = []
        while self._ready and self.num_running < self._max_batch:
            job = self._ready[0]
            if not self._has_room(job, job.num_prompt):
                break
            pool = self._device(job.version.base).pool
            if job.num_left == 1:
                sequence = job.prompt  # nobody needs it after this
                sequence.index = job.next_sample
            else:
                fork = job.prompt.fork(pool, job.next_sample)
                if fork is None and self._running:
                    break
                if fork is None:
                    if not self._take_back(job.version.base, job.prompt):
                        self._fail(job, len(job.prompt.blocks) + 1, pool)
                    continue
                sequence = fork
            job.next_sample += 1
            if not job.num_left:
                self._ready.popleft()
            begun.append(sequence)
            self._running.append(sequence)
        for base in {id(s.job.version.base): s for s in begun}.values():
            own = [s for s in begun if s.job.version.base is base.job.version.base]
            rows = [s.job.logits for s in own if s.job.logits is not None]
            self._draw([DrawnRows(s, i) for i, s in enumerate(own)], torch.stack(rows))

    def _draw(self, turns: list[DrawnRows], logits: Tensor) -> None:
        """Draw the target's tokens, keep those that follow what stands, finish what ended."""
        scan = self._runner.scan if self._runner is not None else None
        params = [turn.sequence.row_params(i) for turn in turns for i in range(len(turn.rows))]
        drawn = sample(logits, params, scan)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        ended: list[tuple[Sequence, bool]] = []
        for turn in turns:
            one, rows = turn.sequence, turn.rows
            stands = match(turn.drafted, tokens[rows.start : rows.stop])
            stopped = False
            num_before = len(one.logprobs)
            for row, token in zip(rows, stands.tokens, strict=False):
                stopped = self._write(one, token, logprobs[row], partial(drawn.law, row))
                if stopped or one.num_left <= 0:
                    break
            num_new = len(one.logprobs) - num_before
            self.num_tokens_sampled += num_new
            self._keep(turn, num_new, drawn)
            if stopped or one.num_left <= 0:
                ended.append((one, stopped))
        self._finish(ended)

    @staticmethod
    def _write(sequence: Sequence, token: int, logprob: float, law: Callable[[], Tensor]) -> bool:
        """One more token of a sample. Whether it stops there."""
        job = sequence.job
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if job.request.topk_sample_logprobs:
            sequence.topk.append(topk_rows(law(), job.request.topk_sample_logprobs))
        return job.stop_rule.ends(sequence.tokens, job.num_prompt)

    def _keep(self, turn: DrawnRows, num_new: int, drawn: Drawn) -> None:
        """The drafted tokens that stand have their keys and values already; the others' go."""
        sequence = turn.sequence
        device = self._device(sequence.job.version.base)
        if turn.drafted:
            sequence.advance(device.pool, num_new - 1, named=device.runner.is_exact)
            sequence.give_back(device.pool)
        speculation = device.speculation
        if speculation is None:
            return
        if num_new == len(sequence.logprobs):
            speculation.begin(sequence)
            seen = sequence.job.hidden
            if seen is not None:
                speculation.saw(sequence, sequence.job.num_prompt - len(seen), seen)
            return
        speculation.judged(sequence, num_new, drawn, turn.rows)
        if turn.hidden is not None:
            first = len(sequence.tokens) - num_new - 1
            speculation.saw(sequence, first, turn.hidden[:num_new])
        speculation.wrote(sequence, num_new)

    def _finish(self, ended: Iterable[tuple[Sequence, bool]]) -> None:
        gone: set[int] = set()
        for sequence, stopped in ended:
            gone.add(id(sequence))
            device = self._device(sequence.job.version.base)
            if device.speculation is not None:
                device.speculation.end(sequence)
            sequence.drop_blocks(device.pool)
            sequence.job.finish(sequence, stopped=stopped)
        if gone:
            self._running = [one for one in self._running if id(one) not in gone]
