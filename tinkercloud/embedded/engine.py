"""The sampling engine: one step prefills, admits, decodes and finishes.

Every mutable thing here has one owner, the worker thread that calls `step`. Prompts are prefilled
in chunks with fixed boundaries, rows are padded to whole tiles and attention is summed in whole
tiles, so that a request's tokens do not depend on the requests around it.

Axes: B active sequences, M rows padded to ROW_TILE, D hidden, V vocabulary.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinkercloud.core.types import SampledSequence, SampleOutput, SampleRequest, Topk
from tinkercloud.decoding.sampler import RowParams, sample, topk_rows
from tinkercloud.decoding.stops import StopRule
from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.contexts import PrefillContext, SampleContext, pad_rows, segments_of
from tinkercloud.embedded.kv_cache import DecodeContext, SlotCache
from tinkercloud.embedded.scoring import PromptScores
from tinkercloud.weights.adapters import Adapter

PREFILL_CHUNK = 512
"""Chunk boundaries inside a prompt. Fixed: a boundary that moved with the load would change the
last bits of the prompt's keys and values."""
PREFILL_BUDGET = 2048
PROMPT_CACHE_BYTES = 256 * 1024**2

Reply = Callable[[SampleOutput | BaseException], None]


@dataclass(frozen=True, slots=True)
class Version:
    """Immutable published weights. `weights` are the base's own, or a full fine-tune's."""

    id: str
    base: BaseModel
    weights: dict[str, Tensor]
    adapter: Adapter | None
    scale: float

    @property
    def own_bytes(self) -> int:
        """What it holds beside the shared base."""
        if self.adapter is not None:
            return sum(a.nbytes + b.nbytes for a, b in self.adapter.values())
        if self.weights is self.base.weights:
            return 0
        return sum({id(t): t.nbytes for t in self.weights.values()}.values())

    @property
    def entry(self) -> tuple[Adapter, float] | None:
        return (self.adapter, self.scale) if self.adapter is not None else None


@dataclass(slots=True)
class _Prefilled:
    """A prompt's keys and values per layer and the hidden row (D,) of its last token."""

    past: list[tuple[Tensor, Tensor]]
    last_hidden: Tensor

    def num_bytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.past)


@dataclass(slots=True)
class _Job:
    """A request underway. `done` tokens of its prompt are prefilled."""

    version: Version
    request: SampleRequest
    reply: Reply
    scores: PromptScores | None
    stop_rule: StopRule
    done: int = 0
    past: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    prefilled: _Prefilled | None = None
    cache_hit_tokens: int = 0
    next_sample: int = 0
    sequences: dict[int, SampledSequence] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, bytes]:
        return (self.version.id, self.request.prompt.tobytes())

    @property
    def max_tokens(self) -> int:
        room = self.version.base.config.max_position_embeddings - len(self.request.prompt)
        wanted = self.request.params.max_tokens
        return room if wanted is None else min(wanted, room)

    def prompt_state(self) -> _Prefilled:
        """Only once the whole prompt has been read."""
        assert self.prefilled is not None
        return self.prefilled


@dataclass(slots=True)
class _Running:
    """One sample being decoded; its slot is its index in the lane's list."""

    job: _Job
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Absolute position of the token that is drawn next."""
        return len(self.job.request.prompt) + len(self.tokens)

    def row_params(self) -> RowParams:
        p = self.job.request.params
        return RowParams(p.temperature, p.top_k, p.top_p, p.seed, self.index, self.position)


class _Lane:
    """The sequences that share base weights, and so one forward pass."""

    def __init__(self, version: Version):
        self.base = version.base
        self.weights = version.weights
        self.cache = SlotCache(version.base.config, version.base.dtype, version.base.device)
        self.running: list[_Running] = []


class SamplingEngine:
    """submit() requests, call step() while busy; replies come from inside step()."""

    def __init__(self, *, max_batch: int, kv_cache_bytes: int):
        self._max_batch = max_batch
        self._kv_cache_bytes = kv_cache_bytes
        self._waiting: deque[_Job] = deque()
        self._ready: deque[_Job] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._prompt_cache: OrderedDict[tuple[str, bytes], _Prefilled] = OrderedDict()
        self.num_tokens_sampled = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._ready or self._lanes)

    @property
    def num_running(self) -> int:
        return sum(len(lane.running) for lane in self._lanes.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._ready)

    def submit(self, version: Version, request: SampleRequest, reply: Reply) -> None:
        scores = PromptScores(request) if PromptScores.wanted(request) else None
        rule = StopRule(request.params, version.base.config.eos_token_ids, version.base.decoder)
        self._waiting.append(_Job(version, request, reply, scores, rule))

    def forget(self, version_id: str) -> None:
        """Drop cached prompts of a released version; samples underway finish."""
        for key in [k for k in self._prompt_cache if k[0] == version_id]:
            del self._prompt_cache[key]

    @torch.inference_mode()
    def step(self) -> None:
        """One round: prefill a budget of prompt rows, admit, decode one token per sequence."""
        self._prefill()
        self._admit()
        for key, lane in list(self._lanes.items()):
            if lane.running:
                self._decode(lane)
            if not lane.running:
                del self._lanes[key]

    def fail_all(self, error: BaseException) -> None:
        """Answer everything underway with `error` and drop it."""
        jobs = {id(j): j for j in (*self._waiting, *self._ready)}
        for lane in self._lanes.values():
            jobs |= {id(r.job): r.job for r in lane.running}
        self._waiting.clear()
        self._ready.clear()
        self._lanes.clear()
        self._prompt_cache.clear()
        for job in jobs.values():
            job.reply(error)

    # ---- prefill

    def _prefill(self) -> None:
        if not self._waiting or len(self._ready) >= self._max_batch:
            return
        chosen, rows, twins = [], 0, set()
        weights = None
        for job in self._waiting:
            if job.done == 0 and job.scores is None and self._from_cache(job):
                continue
            # A prompt that another waiting request is about to prefill will be in the cache.
            if job.scores is None and job.key in twins:
                continue
            if rows >= PREFILL_BUDGET or weights not in (None, id(job.version.weights)):
                continue
            weights = id(job.version.weights)
            twins.add(job.key)
            chosen.append(job)
            rows += min(PREFILL_CHUNK, len(job.request.prompt) - job.done)
        if chosen:
            self._prefill_chunks(chosen)
        self._ready.extend(j for j in self._waiting if j.prefilled is not None)
        self._waiting = deque(j for j in self._waiting if j.prefilled is None)

    def _from_cache(self, job: _Job) -> bool:
        found = self._prompt_cache.get(job.key)
        if found is None:
            return False
        self._prompt_cache.move_to_end(job.key)
        job.prefilled = found
        job.cache_hit_tokens = len(job.request.prompt)
        return True

    def _prefill_chunks(self, jobs: list[_Job]) -> None:
        chunks = [j.request.prompt[j.done : j.done + PREFILL_CHUNK] for j in jobs]
        lengths = [len(c) for c in chunks]
        total, base = sum(lengths), jobs[0].version.base
        tokens = np.zeros(pad_rows(total), np.int64)
        positions = np.zeros(pad_rows(total), np.int64)
        tokens[:total] = np.concatenate(chunks)
        positions[:total] = np.concatenate(
            [np.arange(j.done, j.done + n) for j, n in zip(jobs, lengths, strict=True)]
        )
        entries = [j.version.entry for j, n in zip(jobs, lengths, strict=True) for _ in range(n)]
        entries += [entries[-1]] * (len(tokens) - total)
        segments = segments_of(entries, base.device)
        past = [j.past for j in jobs]
        context = PrefillContext(jobs[0].version.weights, segments, lengths, past)
        hidden = base.architecture.hidden(context, base.tensor(tokens), base.tensor(positions))
        start = 0
        for job, length in zip(jobs, lengths, strict=True):
            self._after_chunk(job, hidden[start : start + length])
            start += length

    def _after_chunk(self, job: _Job, hidden: Tensor) -> None:
        if job.scores is not None:
            job.scores.add(job.done, hidden, lambda h: self._unembed([job.version] * len(h), h))
        job.done += len(hidden)
        if job.done < len(job.request.prompt):
            return
        job.prefilled = _Prefilled(job.past, hidden[-1].clone())
        self._prompt_cache[job.key] = job.prefilled
        total = sum(p.num_bytes() for p in self._prompt_cache.values())
        while total > PROMPT_CACHE_BYTES:
            total -= self._prompt_cache.popitem(last=False)[1].num_bytes()

    def _unembed(self, versions: list[Version], hidden: Tensor) -> Tensor:
        """hidden (M, D), whole tiles -> logits (M, V); row i is read with versions[i]."""
        base = versions[0].base
        segments = segments_of([v.entry for v in versions], base.device)
        return base.architecture.unembed(SampleContext(versions[0].weights, segments), hidden)

    # ---- admission

    def _admit(self) -> None:
        fresh: dict[int, list[_Running]] = {}
        while self._ready and self.num_running < self._max_batch:
            job = self._ready[0]
            lane = self._lanes.setdefault(id(job.version.weights), _Lane(job.version))
            need = len(job.request.prompt) + min(job.max_tokens, PREFILL_CHUNK)
            full = lane.cache.bytes_for(len(lane.running) + 1, need) > self._kv_cache_bytes
            if full and self.num_running:
                break
            running = _Running(job, job.next_sample)
            lane.cache.add(job.prompt_state().past, len(job.request.prompt) + 1)
            lane.running.append(running)
            fresh.setdefault(id(job.version.weights), []).append(running)
            job.next_sample += 1
            if job.next_sample == job.request.num_samples:
                self._ready.popleft()
        for key, sequences in fresh.items():
            self._first_tokens(self._lanes[key], sequences)

    def _first_tokens(self, lane: _Lane, fresh: list[_Running]) -> None:
        hidden = [r.job.prompt_state().last_hidden for r in fresh]
        hidden += [hidden[-1]] * (pad_rows(len(hidden)) - len(hidden))
        versions = [r.job.version for r in fresh]
        versions += [versions[-1]] * (len(hidden) - len(fresh))
        logits = self._unembed(versions, torch.stack(hidden))[: len(fresh)]
        self._draw(lane, fresh, logits)

    # ---- decode

    def _decode(self, lane: _Lane) -> None:
        running, base = lane.running, lane.base
        num, padded = len(running), pad_rows(len(running))
        positions = np.array([r.position - 1 for r in running], np.int64)
        lane.cache.reserve(num, int(positions.max()) + 1)
        tokens = np.zeros(padded, np.int64)
        tokens[:num] = [r.tokens[-1] for r in running]
        entries = [r.job.version.entry for r in running]
        entries += [entries[-1]] * (padded - num)
        segments = segments_of(entries, base.device)
        context = DecodeContext(lane.weights, segments, lane.cache, base.tensor(positions))
        row_positions = base.tensor(np.pad(positions, (0, padded - num)))
        hidden = base.architecture.hidden(context, base.tensor(tokens), row_positions)
        logits = base.architecture.unembed(context, hidden)[:num]
        self._draw(lane, list(running), logits)

    def _draw(self, lane: _Lane, rows: list[_Running], logits: Tensor) -> None:
        """Sample one token per row, record it, finish what ended."""
        drawn = sample(logits, [r.row_params() for r in rows])
        self.num_tokens_sampled += len(rows)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        for i, (running, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            running.tokens.append(token)
            running.logprobs.append(logprob)
            k = running.job.request.topk_sample_logprobs
            if k:
                running.topk.append(topk_rows(drawn.law(i), k))
        for running in rows:
            stopped = running.job.stop_rule.ends(running.tokens)
            if stopped or len(running.tokens) >= running.job.max_tokens:
                self._finish(lane, running, stopped)

    def _finish(self, lane: _Lane, running: _Running, stopped: bool) -> None:
        slot = next(i for i, r in enumerate(lane.running) if r is running)
        lane.cache.free(slot)
        last = lane.running.pop()
        if last is not running:
            lane.running[slot] = last
        job = running.job
        job.sequences[running.index] = SampledSequence(
            tokens=np.array(running.tokens, np.int32),
            logprobs=np.array(running.logprobs, np.float32),
            stop_reason="stop" if stopped else "length",
            topk=_stack(running.topk),
        )
        if len(job.sequences) == job.request.num_samples:
            job.reply(_output(job))


def _stack(rows: list[tuple[np.ndarray, np.ndarray]]) -> Topk | None:
    if not rows:
        return None
    return Topk(np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows]))


def _output(job: _Job) -> SampleOutput:
    scores = job.scores
    return SampleOutput(
        sequences=tuple(job.sequences[i] for i in range(job.request.num_samples)),
        prompt_logprobs=scores.logprobs if scores else None,
        topk_prompt_logprobs=scores.topk if scores else None,
        target_prompt_logprobs=scores.target_logprobs if scores else None,
        prompt_cache_hit_tokens=job.cache_hit_tokens,
    )
