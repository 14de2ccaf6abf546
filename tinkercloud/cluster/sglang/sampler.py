"""The sampler inside SGLang: it draws and stops as `tinkercloud.decoding` does, row by row.

A request carries its parameters in `sampling_params.custom_params` (`cluster.rollout.generate`
writes them, this file reads them); a request without ours is sampled and stopped as SGLang does.
SGLang hands custom parameters to a batch for its logit processors only, so our rows travel beside
the batch: its three extension points, made for such additions, keep them in step with its rows.

Axes: B rows, V vocabulary.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own.

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from torch import Tensor

from tinkercloud.cluster.rollout.sampling_params import SampleParams, sample_params_of, stop_rule_of
from tinkercloud.decoding.sampler import Drawn, RowParams, sample

_ROWS = "tinkercloud_sample_params"
_RULE = "tinkercloud_stop_rule"


def attach(info: Any, batch: Any, _vocab_size: int) -> None:
    """SamplingBatchInfo.adjusted_from_schedule_batch: our parameters, or None, per request."""
    setattr(info, _ROWS, [sample_params_of(r.sampling_params.custom_params) for r in batch.reqs])


def keep_rows(info: Any, keep: Sequence[int], _keep_on_device: Tensor) -> None:
    """SamplingBatchInfo.adjusted_filter_batch."""
    rows = _params_of(info)
    setattr(info, _ROWS, [rows[i] for i in keep])


def append_rows(info: Any, other: Any) -> None:
    """SamplingBatchInfo.adjusted_merge_batch."""
    setattr(info, _ROWS, _params_of(info) + _params_of(other))


def copy_with_rows(original: Callable[..., Any], info: Any) -> Any:
    """SamplingBatchInfo.copy_for_forward."""
    copied = original(info)
    setattr(copied, _ROWS, list(_params_of(info)))
    return copied


def check_stop(original: Callable[..., bool], request: Any, accepted: list[int]) -> bool:
    """Req._check_token_based_finish: our rule where the request has one, and nothing else."""
    rule = getattr(request, _RULE, None)
    if rule is None:
        params = sample_params_of(request.sampling_params.custom_params)
        if params is None:
            return original(request, accepted)
        rule = stop_rule_of(params, request.tokenizer)
        setattr(request, _RULE, rule)
    tokens = list(request.output_ids)
    for end in range(len(tokens) - len(accepted) + 1, len(tokens) + 1):
        if rule.ends(tokens[:end]):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=tokens[end - 1])
            request.finished_len = end
            return True
    return False


def _params_of(info: Any) -> list[SampleParams | None]:
    return getattr(info, _ROWS)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a batch's requests ask about each drawn token, one entry per row."""

    logprobs: bool
    topk: list[int]
    token_ids: list[list[int] | None]


class LawSampler(Sampler):
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
        params = _params_of(sampling_info)
        ours = [i for i, row in enumerate(params) if row is not None]
        asked = (return_logprob, top_logprobs_nums, token_ids_logprobs)
        if not ours:
            return super().forward(logits_output, sampling_info, *asked, positions, **more)
        wanted = _Wanted(*asked)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        if len(ours) == len(params):
            drawn = _draw(logits, params, positions)
            if return_logprob:
                _report(drawn, wanted).write_output_to(logits_output)
            self._sync_token_ids_across_tp(drawn.tokens, sampling_info)
            return drawn.tokens
        # SGLang's sampler writes into the logits: it gets a copy.
        output = copy.copy(logits_output)
        output.next_token_logits = logits.clone()
        tokens = super().forward(output, sampling_info, *asked, positions, **more).long()
        drawn = _draw(logits[ours], [params[i] for i in ours], positions[ours])
        tokens[ours] = drawn.tokens
        self._sync_token_ids_across_tp(tokens, sampling_info)
        if return_logprob:
            _merge(output, _report(drawn, _rows(wanted, ours)), ours, logits_output)
        return tokens


def _draw(logits: Tensor, params: Sequence[SampleParams | None], positions: Tensor) -> Drawn:
    rows = [
        RowParams(row.params, row.sample_index, position + 1)
        for row, position in zip(params, positions.tolist(), strict=True)
        if row is not None
    ]
    return sample(logits, rows)


def _rows(wanted: _Wanted, rows: list[int]) -> _Wanted:
    return _Wanted(
        wanted.logprobs, [wanted.topk[i] for i in rows], [wanted.token_ids[i] for i in rows]
    )


def _report(drawn: Drawn, wanted: _Wanted) -> LogprobResult:
    """Log-probabilities under the law sampled from; ties of the k best to the lower id."""
    result = LogprobResult(token_logprobs=drawn.logprobs)
    most = max(wanted.topk, default=0)
    chosen = any(ids is not None for ids in wanted.token_ids)
    if not most and not chosen:
        return result
    law = drawn.laws()
    law = law.clamp(min=torch.finfo(law.dtype).min)  # infinities do not survive JSON
    if most:
        values, ids = torch.sort(law, dim=-1, descending=True, stable=True)
        result.top_logprobs_val = [values[i, :k] for i, k in enumerate(wanted.topk)]
        result.top_logprobs_idx = [ids[i, :k] for i, k in enumerate(wanted.topk)]
    if chosen:
        picks = [ids or [] for ids in wanted.token_ids]
        result.token_ids_logprobs_val = [law[i, ids] for i, ids in enumerate(picks)]
        result.token_ids_logprobs_idx = picks
    return result


def _merge(plain: Any, result: LogprobResult, rows: list[int], target: Any) -> None:
    """SGLang's report of every row, with our rows replaced, onto the batch's output."""
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
