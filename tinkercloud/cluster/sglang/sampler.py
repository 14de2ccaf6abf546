"""The sampler inside SGLang: that of `tinkercloud.decoding`, row by row, and its stops.

A request carries its parameters in `sampling_params.custom_params` (`cluster.rollout.generate`
writes them, this file reads them); a request without them is sampled and stopped as SGLang does.
SGLang hands custom parameters to a batch for its logit processors only, so one `SampleParams` for
each row is attached to the batch; SGLang's three extension points for such additions
(`SamplingBatchInfo.adjusted_*`) keep them in the order of the batch's rows.

Axes: B rows, V vocabulary.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own.

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from torch import Tensor

from tinkercloud.cluster.rollout.sampling_params import SampleParams, sample_params_of, stop_rule_of
from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.adjustment import adjustment_of
from tinkercloud.decoding.sampler import Drawn, RowParams, sample

_ROWS = "tinkercloud_sample_params"
_ROW = "tinkercloud_row"
_RULE = "tinkercloud_stop_rule"


def attach(info: Any, batch: Any, _vocab_size: int) -> None:
    """SamplingBatchInfo.adjusted_from_schedule_batch: parameters (or None) for each request."""
    setattr(info, _ROWS, [_row_of(request) for request in batch.reqs])


def keep_rows(info: Any, keep: Sequence[int], _keep_on_device: Tensor) -> None:
    """SamplingBatchInfo.adjusted_filter_batch."""
    params = _rows_of(info)
    setattr(info, _ROWS, [params[i] for i in keep])


def append_rows(info: Any, other: Any) -> None:
    """SamplingBatchInfo.adjusted_merge_batch."""
    setattr(info, _ROWS, _rows_of(info) + _rows_of(other))


def copy_with_rows(original: Callable[..., Any], info: Any) -> Any:
    """SamplingBatchInfo.copy_for_forward, which copies the fields that SGLang knows."""
    copied = original(info)
    setattr(copied, _ROWS, list(_rows_of(info)))
    return copied


def check_stop(original: Callable[..., bool], request: Any, accepted: list[int]) -> bool:
    """Req._check_token_based_finish: our rule alone where the request has our parameters."""
    rule = getattr(request, _RULE, None)
    if rule is None:
        params = sample_params_of(request.sampling_params.custom_params)
        if params is None:
            return original(request, accepted)
        rule = stop_rule_of(params, request.tokenizer)
        setattr(request, _RULE, rule)
    tokens = list(request.output_ids)
    # With SGLang's own speculation several tokens come at once: the first that ends it counts.
    for end in range(len(tokens) - len(accepted) + 1, len(tokens) + 1):
        if rule.ends(tokens[:end]):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=tokens[end - 1])
            request.finished_len = end
            return True
    return False


@dataclass(slots=True)
class _Row:
    """A request of ours. drawn: its tokens by position, where penalties need them. Not SGLang's
    `output_ids`: with overlap these come a step later."""

    sample: SampleParams
    drawn: dict[int, int] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        return self.sample.params

    def row_params(self, position: int) -> RowParams:
        sampled = [self.drawn[at] for at in sorted(self.drawn) if at < position]
        adjustment = adjustment_of(self.params, sampled)
        return RowParams(self.params, self.sample.sample_index, position, adjustment)

    def committed(self, position: int) -> int | None:
        """The token that it must have there."""
        at = position - self.sample.first_position
        tokens = self.sample.committed
        return tokens[at] if 0 <= at < len(tokens) else None


def _row_of(request: Any) -> _Row | None:
    """One for a request, whatever batches it comes to."""
    row = getattr(request, _ROW, None)
    if row is None:
        sample = sample_params_of(request.sampling_params.custom_params)
        row = None if sample is None else _Row(sample)
        setattr(request, _ROW, row)
    return row


def _rows_of(info: Any) -> list[_Row | None]:
    return getattr(info, _ROWS)


@dataclass(frozen=True, slots=True)
class _ReportOptions:
    """What is reported of each drawn token, one entry per row."""

    logprobs: bool
    topk: list[int]
    token_ids: list[list[int] | None]


class SeededSampler(Sampler):
    """SGLang's sampler for rows without our parameters, ours for rows with them."""

    def forward(  # noqa: PLR0913 (SGLang's signature)
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: Tensor,
        **more: Any,
    ) -> Tensor:
        """One token per row, int64 (B,). positions (B,): of the last token read, not drawn."""
        params = _rows_of(sampling_info)
        ours = [i for i, row in enumerate(params) if row is not None]
        report = (return_logprob, top_logprobs_nums, token_ids_logprobs)
        if not ours:
            return super().forward(logits_output, sampling_info, *report, positions, **more)
        options = _ReportOptions(*report)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        if len(ours) == len(params):
            drawn = _draw(logits, params, positions)
            if return_logprob:
                _report(drawn, options).write_output_to(logits_output)
            self._sync_token_ids_across_tp(drawn.tokens, sampling_info)
            return drawn.tokens
        # SGLang's sampler overwrites the logits: it gets a copy.
        output = copy.copy(logits_output)
        output.next_token_logits = logits.clone()
        tokens = super().forward(output, sampling_info, *report, positions, **more).long()
        drawn = _draw(logits[ours], [params[i] for i in ours], positions[ours])
        tokens[ours] = drawn.tokens
        # Once more: SGLang's call above synchronised the tokens that ours have replaced.
        self._sync_token_ids_across_tp(tokens, sampling_info)
        if return_logprob:
            _merge(output, _report(drawn, _rows(options, ours)), ours, logits_output)
        return tokens


def _draw(logits: Tensor, rows: Sequence[_Row | None], positions: Tensor) -> Drawn:
    drawn_at = [
        (row, position + 1)
        for row, position in zip(rows, positions.tolist(), strict=True)
        if row is not None
    ]
    drawn = sample(logits, [row.row_params(position) for row, position in drawn_at])
    for i, (row, position) in enumerate(drawn_at):
        committed = row.committed(position)
        if committed is not None:
            drawn.tokens[i] = committed
        if row.params.has_penalties:
            row.drawn[position] = int(drawn.tokens[i])
    return drawn


def _rows(options: _ReportOptions, rows: list[int]) -> _ReportOptions:
    return _ReportOptions(
        options.logprobs, [options.topk[i] for i in rows], [options.token_ids[i] for i in rows]
    )


def _report(drawn: Drawn, options: _ReportOptions) -> LogprobResult:
    """Log-probabilities under the distribution sampled from; ties of the k best to the lower id."""
    result = LogprobResult(token_logprobs=drawn.logprobs)
    most = max(options.topk, default=0)
    chosen = any(ids is not None for ids in options.token_ids)
    if not most and not chosen:
        return result
    distributions = drawn.distributions()
    # Infinities do not survive JSON.
    distributions = distributions.clamp(min=torch.finfo(distributions.dtype).min)
    if most:
        values, ids = torch.sort(distributions, dim=-1, descending=True, stable=True)
        result.top_logprobs_val = [values[i, :k] for i, k in enumerate(options.topk)]
        result.top_logprobs_idx = [ids[i, :k] for i, k in enumerate(options.topk)]
    if chosen:
        picks = [ids or [] for ids in options.token_ids]
        result.token_ids_logprobs_val = [distributions[i, ids] for i, ids in enumerate(picks)]
        result.token_ids_logprobs_idx = picks
    return result


def _merge(plain: Any, result: LogprobResult, rows: list[int], target: Any) -> None:
    """SGLang's report of every row, with our rows replaced, into the batch's output."""
    pairs = {
        "next_token_logprobs": result.token_logprobs,
        "next_token_top_logprobs_val": result.top_logprobs_val,
        "next_token_top_logprobs_idx": result.top_logprobs_idx,
        "next_token_token_ids_logprobs_val": result.token_ids_logprobs_val,
        "next_token_token_ids_logprobs_idx": result.token_ids_logprobs_idx,
    }
    for name, values in pairs.items():
        all_rows = getattr(plain, name, None)
        if all_rows is not None and values is not None:
            for row, value in zip(rows, values, strict=True):
                all_rows[row] = value
        setattr(target, name, all_rows)
