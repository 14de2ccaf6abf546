# pyright: reportPrivateImportUsage=false
"""AdamW with all six parameters given per step, as the wire specification (section 8) has it.

The arithmetic is torch.optim.AdamW's (Loshchilov & Hutter 2019): decoupled weight decay, bias
correction. State and weights are float32.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud.core.types import AdamParams
from tinkercloud.embedded.training.parts import Between, in_parts, nothing
from tinkercloud.errors import GradientNotFinite, UserError, WeightsNotFinite

SURELY_FINITE = 1e37
"""A tenth of float32's largest number: rounding cannot carry a bound below it beyond that one."""
GROUP_BYTES = 2**28  # of tensors that a GPU works on at once, and so of what that needs besides


@dataclass(frozen=True, slots=True)
class _Bounds:
    """No number of the weights, or of either moment, is larger. inf or NaN: nothing is known."""

    weight: float
    first: float
    second: float

    def after(self, norm: float, num_steps: int, hyper: AdamParams) -> "_Bounds":
        """Of a step with a gradient of this norm: no entry of it is larger."""
        first = hyper.beta1 * self.first + (1 - hyper.beta1) * norm
        second = hyper.beta2 * self.second + (1 - hyper.beta2) * norm * norm
        mean = first / (1 - hyper.beta1**num_steps)
        moved = hyper.learning_rate * mean / hyper.eps if hyper.eps > 0 else math.inf
        decayed = 1 + hyper.learning_rate * hyper.weight_decay
        return _Bounds(self.weight * decayed + moved, first, second)

    @property
    def are_finite(self) -> bool:
        # NaN is below nothing.
        return all(each < SURELY_FINITE for each in (self.weight, self.first, self.second))


class AdamW:
    """Moments for a fixed list of named parameters. Owns no gradient. between: is called
    between the parts of long work."""

    def __init__(self, params: dict[str, Tensor], between: Between = nothing):
        self.params = params
        self.between = between
        self.num_steps = 0
        self._bounds: _Bounds | None = None
        self.exp_avg = _zeros(params, between)
        self.exp_avg_sq = _zeros(params, between)

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], hyper: AdamParams) -> dict[str, float]:
        """Update in place. Parameters without an entry in `grads` count as gradient 0.

        Raises GradientNotFinite and WeightsNotFinite, changing nothing.
        """
        norm = _global_norm(grads, self.between)
        if not math.isfinite(norm):
            raise GradientNotFinite
        scale = min(1.0, hyper.grad_clip_norm / (norm + 1e-6)) if hyper.grad_clip_norm > 0 else 1.0
        bounds = self._bounds_after(norm * scale, hyper)
        if bounds.are_finite:
            self._step(grads, scale, hyper)
        else:
            self._checked_step(grads, scale, hyper)
        self._bounds = bounds
        return {"unclipped_grad_l2:mean": norm, "clipped_grad_l2:mean": norm * scale}

    def _bounds_after(self, norm: float, hyper: AdamParams) -> _Bounds:
        """From the bounds before, which costs nothing; where these have become too wide, from the
        tensors."""
        if self._bounds is not None:
            bounds = self._bounds.after(norm, self.num_steps + 1, hyper)
            if bounds.are_finite:
                return bounds
        tensors = self.params, self.exp_avg, self.exp_avg_sq
        largest = (_largest(each, self.between) for each in tensors)
        return _Bounds(*largest).after(norm, self.num_steps + 1, hyper)

    def _checked_step(self, grads: dict[str, Tensor], scale: float, hyper: AdamParams) -> None:
        """A step that may leave the range of float32: undone, bit for bit, where it does."""
        tensors = [*self.params.values(), *self.exp_avg.values(), *self.exp_avg_sq.values()]
        before = [tensor.clone() for tensor in in_parts(tensors, self.between)]
        fault: str | None
        try:
            self._step(grads, scale, hyper)
            fault = self._fault()
        except RuntimeError as error:  # PyTorch takes no factor that float32 does not have
            fault = str(error)
        if fault is None:
            return
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        self.num_steps -= 1
        raise WeightsNotFinite(fault, hyper)

    def _fault(self) -> str | None:
        kinds = ("weight", self.params), ("first moment", self.exp_avg)
        for kind, tensors in (*kinds, ("second moment", self.exp_avg_sq)):
            for name, tensor in in_parts(tensors.items(), self.between):
                num_bad = tensor.numel() - int(torch.isfinite(tensor).sum())
                if num_bad:
                    return f"{num_bad} of {tensor.numel()} numbers of the {kind} of {name}"
        return None

    def _step(self, grads: dict[str, Tensor], scale: float, hyper: AdamParams) -> None:
        self.num_steps += 1
        for names in in_parts(_groups(self.params), self.between):
            self._update(names, grads, scale, hyper)

    def _update(
        self, names: Sequence[str], grads: dict[str, Tensor], scale: float, hyper: AdamParams
    ) -> None:
        params, m, v = (
            [of[name] for name in names] for of in (self.params, self.exp_avg, self.exp_avg_sq)
        )
        torch._foreach_mul_(m, hyper.beta1)
        torch._foreach_mul_(v, hyper.beta2)
        moved = [i for i, name in enumerate(names) if name in grads]
        if moved:
            own = [grads[names[i]] for i in moved]
            if scale != 1.0:
                own = torch._foreach_mul(own, scale)
            torch._foreach_add_([m[i] for i in moved], own, alpha=1 - hyper.beta1)
            torch._foreach_addcmul_([v[i] for i in moved], own, own, value=1 - hyper.beta2)
        correction1 = 1 - hyper.beta1**self.num_steps
        correction2 = math.sqrt(1 - hyper.beta2**self.num_steps)
        if hyper.weight_decay:
            torch._foreach_mul_(params, 1 - hyper.learning_rate * hyper.weight_decay)
        # With eps 0 a gradient that was always 0 would give 0/0: such a weight does not move.
        denominators = torch._foreach_sqrt(v)
        torch._foreach_div_(denominators, correction2)
        torch._foreach_add_(denominators, hyper.eps)
        if hyper.eps == 0:
            for denominator in denominators:
                denominator.masked_fill_(denominator == 0, 1.0)
        torch._foreach_addcdiv_(params, m, denominators, value=-hyper.learning_rate / correction1)

    def state(self) -> dict[str, Tensor]:
        """Flat tensors for a checkpoint, which stores the step count elsewhere."""
        return {
            **{f"exp_avg.{n}": t for n, t in self.exp_avg.items()},
            **{f"exp_avg_sq.{n}": t for n, t in self.exp_avg_sq.items()},
        }

    def load_state(self, tensors: dict[str, Tensor], num_steps: int) -> None:
        """Raises UserError when the tensors are not those of `params`."""
        if tensors.keys() != self.state().keys():
            raise UserError("the checkpoint's optimizer state does not fit this model")
        for name, moment in self.state().items():
            if tensors[name].shape != moment.shape:
                raise UserError(f"the checkpoint's optimizer state {name} has a wrong shape")
            moment.copy_(tensors[name])
        self.num_steps = num_steps
        self._bounds = None


def _zeros(params: Mapping[str, Tensor], between: Between) -> dict[str, Tensor]:
    return {name: torch.zeros_like(param) for name, param in in_parts(params.items(), between)}


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors that are worked on together: one by one on a CPU, whose cache a tensor may
    fit, else by GROUP_BYTES, since a GPU would wait for the launch of each."""
    group: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if group and (not tensor.is_cuda or num_bytes + tensor.nbytes > GROUP_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(name)
        num_bytes += tensor.nbytes
    if group:
        yield group


def _largest(tensors: Mapping[str, Tensor], between: Between) -> float:
    """The largest absolute number; NaN where one is."""
    if not tensors:
        return 0.0
    return float(torch.stack(_norms(tensors, math.inf, between)).max())


def _global_norm(grads: dict[str, Tensor], between: Between) -> float:
    if not grads:
        return 0.0
    norms = torch.stack(_norms(grads, 2.0, between))
    return float(torch.linalg.vector_norm(norms.double()))


def _norms(tensors: Mapping[str, Tensor], order: float, between: Between) -> list[Tensor]:
    groups = in_parts(_groups(tensors), between)
    return [
        norm
        for names in groups
        for norm in torch._foreach_norm([tensors[name] for name in names], order)
    ]
