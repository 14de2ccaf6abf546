"""One batch through a rank's network: Megatron's schedules, our losses, results by datum.

Axes: T rows of a micro-batch, C = T / cp of them on this rank (1 / tp of those as hidden rows with
sequence parallelism), K targets per position, D hidden size, W vocabulary columns of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from tinkercloud.cluster.training import packing
from tinkercloud.cluster.training.logprobs import chunked_logprobs, gather_rows, target_logprobs
from tinkercloud.cluster.training.packing import MicroBatch
from tinkercloud.cluster.training.rank_types import RankOutput
from tinkercloud.core.types import TrainBatch
from tinkercloud.errors import UserError
from tinkercloud.losses import load_loss
from tinkercloud.losses.custom.evaluation import run
from tinkercloud.losses.custom.graph import CUSTOM
from tinkercloud.planning.plan import Plan


@dataclass(slots=True)
class _Collected:
    """Results on the device until the batch is done: one copy to the host instead of one per datum,
    each of which would wait for the device."""

    indices: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    elementwise: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)  # of a custom loss
    faults: list[str] = field(default_factory=list)  # of a custom loss


class BatchRunner:
    """Runs batches through this rank's GPTModel. Every rank calls `run` with the same batch.

    control: a group of all ranks for tensors in host memory.
    """

    def __init__(self, model: Any, plan: Plan, device: torch.device, control: ProcessGroup):
        self._model, self._plan, self._device, self._control = model, plan, device, control
        self._tp: Any = parallel_state.get_tensor_model_parallel_group()
        self._cp: Any = parallel_state.get_context_parallel_group()
        self._dp_rank = parallel_state.get_data_parallel_rank()
        # Tensor- and context-parallel ranks of the last stage all have the results: one reports.
        self._reports = (
            parallel_state.is_pipeline_last_stage()
            and self._tp.rank() == 0
            and self._cp.rank() == 0
        )

    def run(self, batch: TrainBatch, *, backward: bool) -> RankOutput | None:
        """With `backward`, adds gradients to the parameters' buffers.

        Raises UserError on every rank alike: for a sequence that is too long (before any pass), and
        for a loss that is not finite (gradients were added, and the caller must undo that).
        """
        packing.check_lengths(batch.data, self._plan.layout)
        planned = packing.plan_micro_batches(batch.data, self._plan.layout)[self._dp_rank]
        collected = _Collected()
        if planned:
            with torch.set_grad_enabled(backward):
                self._schedule(planned, batch, collected, backward)
        losses = self._all_losses(collected, len(batch.data))
        for i, value in enumerate(losses.tolist()):
            if not np.isfinite(value):
                raise UserError(
                    self._custom_fault(batch, collected)
                    or f"the {batch.loss_fn} loss of datum {i} is {value}; the "
                    "gradient of this call was dropped. Check logprobs, advantages and weights"
                )
        if not self._reports:
            return None
        outputs = _on_host(collected, batch)
        return RankOutput(tuple(collected.indices), outputs, {"loss:sum": float(losses.sum())})

    def _custom_fault(self, batch: TrainBatch, collected: _Collected) -> str | None:
        """Why a custom loss failed, on whichever rank it did: all ranks say the same."""
        if batch.loss_fn != CUSTOM:
            return None
        faults: list[list[str]] = [[] for _ in range(dist.get_world_size(self._control))]
        dist.all_gather_object(faults, collected.faults, group=self._control)
        return next((texts[0] for texts in faults if texts), None)

    def _schedule(
        self, planned: list[MicroBatch], batch: TrainBatch, collected: _Collected, backward: bool
    ) -> None:
        def step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(micro_batches)
            return self._hidden(micro, batch), partial(self._loss, micro, batch, collected)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(planned),
            model=[self._model],
            num_microbatches=len(planned),
            seq_length=self._plan.layout.microbatch_tokens,
            micro_batch_size=1,
            forward_only=not backward,
        )

    def _hidden(self, micro: MicroBatch, batch: TrainBatch) -> Tensor:
        """The output of this pipeline stage: (C or C / tp, 1, D), on the last one after the final
        norm."""
        rows = packing.rows(micro, batch.data, self._cp.size(), self._cp.rank())
        boundaries = torch.from_numpy(micro.boundaries).to(self._device)
        longest = max(micro.lengths)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        model = self._model
        # Without post_process a GPTModel returns hidden states; `_logprobs` makes logits in chunks.
        is_last, model.post_process = model.post_process, False
        try:
            return model(
                torch.from_numpy(rows.tokens).to(self._device)[None],
                torch.from_numpy(rows.positions).to(self._device)[None],
                None,
                packed_seq_params=packed,
            )
        finally:
            model.post_process = is_last

    def _loss(
        self, micro: MicroBatch, batch: TrainBatch, collected: _Collected, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss, number of tokens, report) of a micro-batch, as Megatron's schedules expect it.

        With calculate_per_token_loss they do not divide by the number: the loss is a sum.
        """
        logprobs = self._logprobs(micro, batch, hidden[:, 0])
        values: list[Tensor] = []
        for index, start in zip(micro.indices, micro.boundaries.tolist(), strict=False):
            datum = batch.data[index]
            targets = datum.inputs["target_tokens"]
            rows = logprobs[start : start + len(targets)]
            scores = rows[:, : targets.shape[1]] if targets.ndim == 2 else rows[:, 0]
            elementwise = self._elementwise(batch, index, scores, collected)
            values.append(elementwise.double().sum())
            collected.indices.append(index)
            collected.losses.append(values[-1].detach())
            collected.logprobs.append(scores.detach().float())
            collected.elementwise.append(elementwise.detach().float())
        # An empty micro-batch has a gradient of 0: its backward pass enters the same collectives.
        loss = torch.stack(values).sum() if values else (logprobs * 0).sum()
        return loss, torch.zeros((), dtype=torch.int, device=self._device), {}

    def _elementwise(
        self, batch: TrainBatch, index: int, scores: Tensor, collected: _Collected
    ) -> Tensor:
        """The losses of a datum's targets, in their shape; a custom loss is one number, ()."""
        datum = batch.data[index]
        if batch.loss_fn != CUSTOM:
            inputs = {n: self._float(v) for n, v in datum.inputs.items() if n != "target_tokens"}
            return load_loss(batch.loss_fn)(scores, inputs, batch.loss_fn_config)
        metrics: dict[str, float] = {}
        try:
            loss, metrics = run(batch.custom_loss, scores.float().cpu(), datum.inputs)
        except UserError as error:
            # Other ranks are in the same pass: it ends for all of them once the losses are shared.
            collected.faults.append(str(error))
            loss = scores.sum() * torch.nan
        collected.metrics.append(metrics)
        return loss.to(self._device)

    def _float(self, value: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).to(self._device)

    def _logprobs(self, micro: MicroBatch, batch: TrainBatch, hidden: Tensor) -> Tensor:
        """float32 (T, K), the same on all context-parallel ranks."""
        cuts = [packing.zigzag(micro.lengths, self._cp.size(), r) for r in range(self._cp.size())]
        targets = torch.from_numpy(packing.targets(micro, batch.data)).to(self._device)
        order = torch.from_numpy(np.concatenate(cuts)).to(self._device)
        local_targets = targets[order.chunk(self._cp.size())[self._cp.rank()]]
        vocab_size = self._plan.megatron.vocab_size

        def logprobs_of(logits: Tensor, row_targets: Tensor) -> Tensor:
            return target_logprobs(logits, row_targets, vocab_size, self._tp)

        local = chunked_logprobs(
            hidden, local_targets, self._unembed, logprobs_of, self._plan.logits_chunk_tokens
        )
        return gather_rows(local, order, self._cp)

    def _unembed(self, hidden: Tensor) -> Tensor:
        """(rows, D) -> (rows of all sequence-parallel ranks, W)."""
        model = self._model
        shared = None
        if model.share_embeddings_and_output_weights:
            shared = model.shared_embedding_or_output_weight()
        logits, _ = model.output_layer(hidden[:, None], weight=shared)
        return logits[:, 0]

    def _all_losses(self, collected: _Collected, num_datums: int) -> Tensor:
        """float64 (num_datums,) in host memory, the same on every rank. Each datum has one
        reporting rank, so that the sum adds zeros only and does not round."""
        losses = torch.zeros(num_datums, dtype=torch.float64)
        if self._reports and collected.indices:
            losses[collected.indices] = torch.stack(collected.losses).cpu()
        dist.all_reduce(losses, group=self._control)
        return losses


def _on_host(
    collected: _Collected, batch: TrainBatch
) -> tuple[dict[str, NDArray[np.float32]], ...]:
    logprobs = _arrays(collected.logprobs)
    if batch.loss_fn == CUSTOM:
        return tuple(
            {"logprobs": a, **{name: np.array([v], np.float32) for name, v in metrics.items()}}
            for a, metrics in zip(logprobs, collected.metrics, strict=True)
        )
    if batch.loss_fn != "cross_entropy":
        return tuple({"logprobs": array} for array in logprobs)
    elementwise = _arrays(collected.elementwise)
    return tuple(
        {"logprobs": a, "elementwise_loss": b} for a, b in zip(logprobs, elementwise, strict=True)
    )


def _arrays(tensors: list[Tensor]) -> list[NDArray[np.float32]]:
    if not tensors:
        return []
    flat = torch.cat([t.flatten() for t in tensors]).cpu().numpy()
    ends = np.cumsum([t.numel() for t in tensors])
    return [
        part.reshape(t.shape) for part, t in zip(np.split(flat, ends[:-1]), tensors, strict=True)
    ]
