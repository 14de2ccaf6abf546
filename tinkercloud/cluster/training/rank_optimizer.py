"""Gradients and AdamW of one model on one rank, on Megatron's DDP buffers and DistributedOptimizer.

Gradients are plain sums over tokens, datums, calls and ranks, never averages. They accumulate in
the DDP buffers over any number of calls and are reduced over the ranks when a step is taken. The
step's arithmetic is that of the embedded backend (`embedded.training.optimizer`), on this rank's
shard.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tinkercloud.core.types import AdamParams
from tinkercloud.errors import UserError

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
_many: Any = torch  # torch._foreach_*: operations on lists of tensors, which torch.optim uses
_ELEMENTS_AT_ONCE = 2**26
"""Elements of which one batch of the update makes temporary copies."""


@dataclass(slots=True)
class Shard:
    """The part of a parameter that this rank updates: elements start..stop of it, flat, float32."""

    start: int
    stop: int
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _ShardedAdam(torch.optim.AdamW):
    """The optimizer that DistributedOptimizer drives. `hyper`, `scale` and `num_steps` are set
    before each step."""

    def __init__(self, params: list[nn.Parameter]):
        super().__init__(params, lr=0.0)
        self.hyper = AdamParams()
        self.scale = 1.0
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for batch in _batches([p for group in self.param_groups for p in group["params"]]):
            self._update(batch)

    def _update(self, params: list[Tensor]) -> None:
        hyper, steps = self.hyper, self.num_steps
        grads = [p.grad for p in params]
        if self.scale != 1.0:
            grads = _many._foreach_mul(grads, self.scale)
        m = [self.state[p]["exp_avg"] for p in params]
        v = [self.state[p]["exp_avg_sq"] for p in params]
        _many._foreach_mul_(m, hyper.beta1)
        _many._foreach_mul_(v, hyper.beta2)
        _many._foreach_add_(m, grads, alpha=1 - hyper.beta1)
        _many._foreach_addcmul_(v, grads, grads, value=1 - hyper.beta2)
        if hyper.weight_decay:
            _many._foreach_mul_(params, 1 - hyper.learning_rate * hyper.weight_decay)
        denominator = _many._foreach_sqrt(v)
        _many._foreach_div_(denominator, math.sqrt(1 - hyper.beta2**steps))
        _many._foreach_add_(denominator, hyper.eps)
        if hyper.eps == 0:  # 0/0 where a gradient was always 0: such a weight stays as it is
            for d in denominator:
                d.masked_fill_(d == 0, 1.0)
        size = -hyper.learning_rate / (1 - hyper.beta1**steps)
        _many._foreach_addcdiv_(params, m, denominator, value=size)


def _batches(params: list[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    numel = 0
    for param in params:
        batch.append(param)
        numel += param.numel()
        if numel >= _ELEMENTS_AT_ONCE:
            yield batch
            batch, numel = [], 0
    if batch:
        yield batch


def _zeros(like: list[Tensor]) -> list[Tensor]:
    """Tensors of these shapes in one storage."""
    if not like:
        return []
    flat = torch.zeros(sum(t.numel() for t in like), dtype=torch.float32, device=like[0].device)
    return [
        part.view(t.shape)
        for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)
    ]


class RankOptimizer:
    """The trainable parameters of one model on this rank.

    module: whose parameters that require gradients are trained; `read` and `write` take their
    names. reduce_gradients: sums gradients over data- and context-parallel ranks
    (`finish_grad_sync`) and over others that hold partial ones. is_counted: whether this rank's
    part of a parameter counts in the norm. snapshot_on_host: where the copy of earlier calls'
    gradients is kept during a call.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Any,
        *,
        reduce_gradients: Callable[[DistributedDataParallel], None],
        is_counted: Callable[[str, nn.Parameter], bool],
        snapshot_on_host: bool,
    ):
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        assert config.calculate_per_token_loss, "gradients must not be averaged"
        self.ddp: Any = DistributedDataParallel(config, ddp_config, module)
        self._reduce_gradients = reduce_gradients
        self._snapshot_on_host = snapshot_on_host
        self._snapshot: list[Tensor] | None = None
        self._has_gradient = False
        self.num_steps = 0
        self.params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._is_counted = {n: is_counted(n, p) for n, p in self.params.items()}
        self._optimizers = [
            self._make(buffers, config)
            for buffers in (self.ddp.buffers, self.ddp.expert_parallel_buffers)
            if buffers
        ]
        self._shards = self._find_shards()

    def _make(self, buffers: list[Any], config: Any) -> DistributedOptimizer:
        params = [p for buffer in buffers for p in buffer.params]
        group = buffers[0].data_parallel_group
        options = OptimizerConfig(
            optimizer="adam", lr=0.0, bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype, use_distributed_optimizer=True,
        )  # fmt: skip
        make: Any = DistributedOptimizer
        with torch.no_grad():  # its shards are views of parameters and need no gradient
            optimizer = make(
                _ShardedAdam(params),
                options,
                None,
                None,
                [self.ddp],
                {0: buffers},
                group,
                None,
                0,
                0,
            )
        # With no chunks, the optimizer's step does not gather parameters: `_apply` gathers those of
        # all buffers at once.
        optimizer.model_chunks = []
        return optimizer

    def _find_shards(self) -> dict[str, Shard]:
        """Shards by parameter name, without parameters of which this rank updates nothing."""
        names = {id(p): n for n, p in self.params.items()}
        shards: dict[str, Shard] = {}
        for optimizer in self._optimizers:
            adam: Any = optimizer.optimizer
            adam.state.clear()
            pairs = list(_main_shards(optimizer))
            exp_avg, exp_avg_sq = _zeros([m for _, m in pairs]), _zeros([m for _, m in pairs])
            for (param, main), m, v in zip(pairs, exp_avg, exp_avg_sq, strict=True):
                adam.state[main] = {"exp_avg": m, "exp_avg_sq": v}
                part = optimizer._get_model_param_range_map(param)["param"]
                shards[names[id(param)]] = Shard(part.start, part.end, main, m, v)
        return shards

    # ---- accumulation

    @property
    def _buffers(self) -> list[Any]:
        return [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]

    def begin(self) -> None:
        """Start a call whose gradients may have to be undone."""
        self._snapshot = None
        if self._has_gradient:
            self._snapshot = [self._copied(buffer.grad_data) for buffer in self._buffers]

    def _copied(self, gradient: Tensor) -> Tensor:
        if not self._snapshot_on_host:
            return gradient.clone()
        host = torch.empty(
            gradient.shape, dtype=gradient.dtype, pin_memory=gradient.device.type == "cuda"
        )
        return host.copy_(gradient)

    def commit(self) -> None:
        self._snapshot, self._has_gradient = None, True

    def undo(self) -> None:
        """Restore the accumulator, bit by bit, to what it was at `begin`."""
        if self._snapshot is None:
            self.ddp.zero_grad_buffer()
        else:
            for buffer, copy in zip(self._buffers, self._snapshot, strict=True):
                buffer.grad_data.copy_(copy)
        self._snapshot = None

    # ---- a step

    @torch.no_grad()
    def step(self, hyper: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradient. Collective over all ranks.

        Raises UserError on every rank when the gradient is not finite; the gradient is cleared then
        and all else is unchanged.
        """
        self._reduce_gradients(self.ddp)
        for optimizer in self._optimizers:
            optimizer.prepare_grads()
        norm = self._global_norm()
        if math.isfinite(norm):
            limit = hyper.grad_clip_norm
            scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
            self.num_steps += 1
            self._apply(hyper, scale)
        self._clear()
        if not math.isfinite(norm):
            raise UserError(
                "the accumulated gradient is not finite; it was dropped and the weights are "
                "unchanged. Check advantages, logprobs and the learning rate"
            )
        return {"unclipped_grad_l2:mean": norm, "clipped_grad_l2:mean": norm * scale}

    def _apply(self, hyper: AdamParams, scale: float) -> None:
        for optimizer in self._optimizers:
            adam: Any = optimizer.optimizer
            adam.hyper, adam.scale, adam.num_steps = hyper, scale, self.num_steps
            optimizer.step_with_ready_grads()
        self.ddp.start_param_sync()

    def _clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.ddp.zero_grad_buffer()
        self._has_gradient = False

    def _global_norm(self) -> float:
        """Over every element of the model once, on whichever rank it is. The sum of squares is
        float64, so that the order of ranks hardly matters."""
        parts = [
            shard.weight.grad
            for name, shard in self._shards.items()
            if self._is_counted[name] and shard.weight.grad is not None
        ]
        square = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
        if parts:
            square += torch.stack(_many._foreach_norm(parts)).double().square().sum()
        dist.all_reduce(square)
        return math.sqrt(float(square))

    # ---- state, for checkpoints

    def read(self, name: str, kind: Kind) -> Tensor:
        """float32, in the shape of this rank's parameter. Collective over its data-parallel ranks,
        each of which has a shard."""
        param = self.params[name]
        if kind == "weight" and param.dtype == torch.float32:
            return param.detach()
        flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if name in self._shards:
            shard = self._shards[name]
            flat[shard.start : shard.stop] = getattr(shard, kind)
        dist.all_reduce(flat, group=self._group(param))
        return flat.view(param.shape)

    @torch.no_grad()
    def write(self, name: str, kind: Kind, value: Tensor) -> None:
        """The reverse of `read`, without communication."""
        param = self.params[name]
        if kind == "weight":
            param.copy_(value)
        if name in self._shards:
            shard = self._shards[name]
            getattr(shard, kind).copy_(value.reshape(-1)[shard.start : shard.stop])

    def reset(self) -> None:
        """No gradient, no moments, no steps."""
        self._clear()
        self.num_steps = 0
        for shard in self._shards.values():
            shard.exp_avg.zero_()
            shard.exp_avg_sq.zero_()

    def _group(self, param: nn.Parameter) -> ProcessGroup:
        expert = not getattr(param, "allreduce", True)
        buffers = self.ddp.expert_parallel_buffers if expert else self.ddp.buffers
        return buffers[0].data_parallel_group

    # ---- memory

    def gradient_tensors(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in self._buffers]

    @property
    def has_gradient(self) -> bool:
        return self._has_gradient

    def parameter_tensors(self) -> list[Tensor]:
        return [buffer.param_data for buffer in self._buffers]

    def state_tensors(self) -> list[Tensor]:
        """Moments, and float32 weights where the parameters are narrower."""
        parameters = {t.untyped_storage().data_ptr() for t in self.parameter_tensors()}
        tensors: list[Tensor] = []
        for shard in self._shards.values():
            tensors += [shard.exp_avg, shard.exp_avg_sq]
            # The float32 shard of a float32 parameter is a view of it, which is counted there.
            if shard.weight.untyped_storage().data_ptr() not in parameters:
                tensors.append(shard.weight)
        return tensors


def _main_shards(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter, the flat float32 shard of it that this rank updates)."""
    for models, mains in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)
