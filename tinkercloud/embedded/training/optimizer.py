"""AdamW with all six parameters given per step, as the wire specification (section 8) has it.

The arithmetic is torch.optim.AdamW's (Loshchilov & Hutter 2019): decoupled weight decay, bias
correction. State and weights are float32.
"""

import math

import torch
from torch import Tensor

from tinkercloud.core.types import AdamParams
from tinkercloud.errors import UserError


class AdamW:
    """Moments for a fixed list of named parameters. Owns no gradient."""

    def __init__(self, params: dict[str, Tensor]):
        self.params = params
        self.num_steps = 0
        self.exp_avg = {n: torch.zeros_like(p) for n, p in params.items()}
        self.exp_avg_sq = {n: torch.zeros_like(p) for n, p in params.items()}

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], hyper: AdamParams) -> dict[str, float]:
        """Update in place. Parameters without an entry in `grads` count as gradient 0.

        Raises UserError, changing nothing, when the gradient is not finite.
        """
        norm = _global_norm(grads)
        if not math.isfinite(norm):
            raise UserError(
                "the accumulated gradient is not finite; it was dropped and the weights are "
                "unchanged. Check advantages, logprobs and the learning rate"
            )
        scale = min(1.0, hyper.grad_clip_norm / (norm + 1e-6)) if hyper.grad_clip_norm > 0 else 1.0
        self.num_steps += 1
        for name, param in self.params.items():
            self._update(name, param, grads.get(name), scale, hyper)
        return {"unclipped_grad_l2:mean": norm, "clipped_grad_l2:mean": norm * scale}

    def _update(
        self, name: str, param: Tensor, grad: Tensor | None, scale: float, hyper: AdamParams
    ) -> None:
        m, v = self.exp_avg[name], self.exp_avg_sq[name]
        m.mul_(hyper.beta1)
        v.mul_(hyper.beta2)
        if grad is not None:
            grad = grad if scale == 1.0 else grad * scale
            m.add_(grad, alpha=1 - hyper.beta1)
            v.addcmul_(grad, grad, value=1 - hyper.beta2)
        correction1 = 1 - hyper.beta1**self.num_steps
        correction2 = math.sqrt(1 - hyper.beta2**self.num_steps)
        if hyper.weight_decay:
            param.mul_(1 - hyper.learning_rate * hyper.weight_decay)
        # With eps 0 a gradient that was always 0 would give 0/0: such a weight does not move.
        denominator = v.sqrt().div_(correction2).add_(hyper.eps)
        if hyper.eps == 0:
            denominator.masked_fill_(denominator == 0, 1.0)
        param.addcdiv_(m, denominator, value=-hyper.learning_rate / correction1)

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


def _global_norm(grads: dict[str, Tensor]) -> float:
    if not grads:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])
    return float(torch.linalg.vector_norm(norms.double()))
