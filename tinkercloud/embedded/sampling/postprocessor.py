"""From the logits of a pass to prompt scores, sampled tokens and finished samples.

Axes: W rows with logits, V vocabulary, M rows of a pass, L layers that a drafter reads,
D hidden size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import (
    Candidates,
    Drawn,
    RowParams,
    sample,
    sample_candidates,
    topk_rows,
)
from tinkercloud.embedded.forward.batch import RowScores
from tinkercloud.embedded.sampling.base_states import BaseState, BaseStates
from tinkercloud.embedded.sampling.batch_plan import BatchItem, DrawnRows, LaunchedPass
from tinkercloud.embedded.sampling.prompt_logprobs import ScoredRows
from tinkercloud.embedded.sampling.scheduler import Scheduler
from tinkercloud.embedded.sampling.sequences import Job, Sequence
from tinkercloud.speculative.verify import match

DRAFTER_ROWS = 64
"""Hidden states of a prompt's last tokens that a drafter gets to see."""


class _ScoreReader:
    """Hands the scores of a pass to the prompts whose rows they are of, item by item."""

    def __init__(self, scores: RowScores | None):
        self._scores = scores
        self._num_rows = self._num_tokens = 0

    def record(self, item: BatchItem, rows: ScoredRows) -> None:
        if not len(rows.ids):
            return
        assert self._scores is not None
        assert item.sequence.job.scores is not None
        tokens = slice(self._num_tokens, self._num_tokens + rows.ids.size)
        norms = slice(self._num_rows, self._num_rows + len(rows.ids))
        self._num_tokens, self._num_rows = tokens.stop, norms.stop
        logits = self._scores.logits[tokens].view(rows.ids.shape)
        item.sequence.job.scores.record(rows, logits, self._scores.norms[norms])


class _FusedDraws:
    """What a pass drew, sample by sample: of some the logits are there too."""

    def __init__(self, candidates: Candidates | None):
        self._candidates = candidates
        self._draws: list[DrawnRows] = []
        self._params: list[RowParams] = []
        self._rows: list[int] = []  # of the candidates
        self._places: list[int] = []  # of these rows, among the logits that the pass kept
        self._num_rows = self._num_kept = 0

    def add(self, item: BatchItem, hidden: Tensor | None) -> bool:
        """hidden (1 + drafted, L, D), or None. Whether the item has its tokens; else the next step
        computes it again, with logits."""
        assert self._candidates is not None
        num = len(item.drawn_with)
        rows = range(self._num_rows, self._num_rows + num)
        kept = range(self._num_kept, self._num_kept + num) if item.keeps_logits else ()
        self._num_rows, self._num_kept = rows.stop, self._num_kept + len(kept)
        if not (self._candidates.count[rows.start : rows.stop] > 0).all():
            item.sequence.needs_logits = True
            return False
        self._draws.append(DrawnRows(item.sequence, len(self._rows), item.drafted, hidden))
        self._params += item.drawn_with
        self._rows += rows
        self._places += kept or [-1] * num
        return True

    def drawn(self) -> tuple[list[DrawnRows], Drawn] | None:
        """None where nothing is."""
        found = self._candidates
        if found is None or not self._draws:
            return None
        if len(self._rows) < len(found.count):
            found = found.of(self._rows)
        return self._draws, sample_candidates(found, self._params, self._places)


class Postprocessor:
    """Appends tokens to sequences; tells the scheduler what is computed, accepted and finished."""

    def __init__(self, states: BaseStates, scheduler: Scheduler):
        self._states, self._scheduler = states, scheduler
        self.num_drawn = 0  # tokens, those of samples that started over included
        self._failed: list[Job] = []

    def take_failed(self) -> list[Job]:
        """Jobs that have an error since the last call; they are unfinished still."""
        failed, self._failed = {id(job): job for job in self._failed}, []
        return [job for job in failed.values() if not job.has_failed]

    def process(self, launched: LaunchedPass) -> None:
        """Take the results of a pass."""
        logits, hidden = launched.logits, launched.hidden
        state = self._states[launched.items[0].base]
        draws: list[DrawnRows] = []
        rows: list[int] = []  # of the pass's logits, in the order of `draws`
        end = num_rows = 0
        fused = _FusedDraws(launched.candidates)
        scores = _ScoreReader(launched.scores)
        for item in launched.items:
            start, end = end, end + item.num_logit_rows
            num_rows += item.num_rows
            first_seen = num_rows - (len(item.drawn_with) or item.num_logit_rows)
            seen = None if hidden is None else hidden[first_seen:num_rows]
            if item.drawn_with:
                if fused.add(item, seen):
                    self._scheduler.computed(item)
                elif item.drafted and state.speculation is not None:
                    state.speculation.drop_draft(item.sequence)
                continue
            if hidden is not None and item.ends and item.sequence.is_prompt:
                last = num_rows - len(item.drafted)
                first = last - min(item.count, DRAFTER_ROWS)
                item.sequence.job.hidden = hidden[first:last].clone()
            targets = item.targets
            if targets is not None:
                scores.record(item, targets)
            if self._advance(item, logits, range(start, end)):
                draw = DrawnRows(item.sequence, len(rows), item.drafted, seen)
                draws.append(draw)
                rows += range(end - len(draw.rows), end)
        if draws:
            self._draw(draws, _rows_of(logits, rows), state)
        drawn = fused.drawn()
        if drawn is not None:
            self._keep(*drawn, state)

    def begin(self, samples: list[Sequence]) -> None:
        """Draw the first tokens of new samples from their prompts' logits."""
        for state in self._states:
            draws: list[DrawnRows] = []
            rows: list[Tensor] = []
            num_rows = 0
            for each in samples:
                logits = each.job.logits
                if each.job.version.base is state.base and logits is not None:
                    drafted = each.job.drafted if len(logits) > 1 else ()
                    draws.append(DrawnRows(each, num_rows, drafted))
                    rows.append(logits)
                    num_rows += len(logits)
            if draws:
                self._draw(draws, torch.cat(rows), state)

    def _advance(self, item: BatchItem, logits: Tensor, rows: range) -> bool:
        """Record what was computed; rows: the item's, of the pass's logits. Whether a token is to
        be drawn from the last of them."""
        job = item.sequence.job
        if item.all_rows and job.scores is not None:
            job.scores.add(item.sequence.num_computed, logits[rows.start : rows.stop])
        ends = item.ends  # before the scheduler counts the item
        self._scheduler.computed(item)
        if not ends:
            return False
        if not item.sequence.is_prompt:
            return True
        job.is_scoring = False
        job.logits = logits[rows.stop - 1 - len(item.drafted) : rows.stop].clone()
        self._scheduler.prompt_computed(job)
        return False

    def _draw(self, draws: list[DrawnRows], logits: Tensor, state: BaseState) -> None:
        """Draw the target's tokens, and keep them."""
        params = [draw.sequence.row_params(i) for draw in draws for i in range(len(draw.rows))]
        self._keep(draws, sample(logits, params, self._states.scan), state)

    def _keep(self, draws: list[DrawnRows], drawn: Drawn, state: BaseState) -> None:
        """Of the target's tokens those that follow accepted ones; finish samples that ended."""
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        complete: list[tuple[Sequence, bool]] = []
        for draw in draws:
            sequence, rows = draw.sequence, draw.rows
            if sequence.job.error is not None:
                self._failed.append(sequence.job)
                continue
            if sequence.committed:
                sequence.overwrite(tokens, logprobs, rows)
            verdict = match(draw.drafted, tokens[rows.start : rows.stop])
            stopped = False
            num_before = len(sequence.logprobs)
            for row, token in zip(rows, verdict.tokens, strict=False):
                stopped = _append(sequence, token, logprobs[row], partial(drawn.distribution, row))
                if stopped or sequence.num_left <= 0:
                    break
            has_ended = stopped or sequence.num_left <= 0 or sequence.leaves_draft
            num_new = len(sequence.logprobs) - num_before
            self.num_drawn += num_new
            if draw.drafted:
                self._scheduler.accepted(sequence, num_new - 1)
            _report(draw, num_new, drawn, state)
            sequence.stream("stop" if stopped else "length" if has_ended else None)
            if has_ended:
                complete.append((sequence, stopped))
        self._finish(complete, state)

    def _finish(self, complete: list[tuple[Sequence, bool]], state: BaseState) -> None:
        for sequence, _ in complete:
            if state.speculation is not None:
                state.speculation.end(sequence)
        self._scheduler.finish(sequence for sequence, _ in complete)
        for sequence, stopped in complete:
            sequence.job.finish(sequence, stopped=stopped)


def _rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    """rows: distinct, ascending; as a rule all of them, and nothing is copied."""
    return logits if len(rows) == len(logits) else logits[rows]


def _append(sequence: Sequence, token: int, logprob: float, logprobs: Callable[[], Tensor]) -> bool:
    """One more token of a sample; logprobs: of all tokens, (1, V). Whether it stops there."""
    job = sequence.job
    if job.request.topk_sample_logprobs:
        k, committed = job.request.topk_sample_logprobs, sequence.committed
        num_sampled = len(sequence.logprobs)
        row = committed[num_sampled][2] if num_sampled < len(committed) else None
        sequence.topk.append(row or topk_rows(logprobs(), k))
    sequence.tokens.append(token)
    sequence.logprobs.append(logprob)
    if sequence.grammar is not None:
        sequence.grammar.accept(token)
        if sequence.grammar.is_over:  # also where the request has no end-of-sequence tokens
            return True
    return job.stop_rule.ends(sequence.tokens, job.num_prompt)


def _report(draw: DrawnRows, num_new: int, drawn: Drawn, state: BaseState) -> None:
    """Report a sample's new tokens to speculation."""
    sequence, speculation = draw.sequence, state.speculation
    if speculation is None:
        return
    if num_new == len(sequence.logprobs):
        speculation.begin(sequence)
        hidden = sequence.job.hidden
        if hidden is not None:
            speculation.observe_hidden(sequence, sequence.job.num_prompt - len(hidden), hidden)
        return
    speculation.record_verdict(sequence, num_new, drawn, draw.rows)
    if draw.hidden is not None:
        first = len(sequence.tokens) - num_new - 1
        speculation.observe_hidden(sequence, first, draw.hidden[:num_new])
    speculation.observe(sequence, num_new)
