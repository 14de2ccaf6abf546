"""Training on one device: gradients of packed micro-batches, accumulated per model until a step.

Sequences are packed without padding, each attends to itself only. A forward_backward is a
generator that yields between micro-batches, so that its owner can serve samples in between.

Axes: T packed rows, N rows of one datum, K targets per position, D hidden, V vocabulary.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkercloud.core.types import AdamParams, Datum, LoraSpec, TrainBatch, TrainOutput
from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.optimizer import AdamW
from tinkercloud.embedded.train_context import TrainContext
from tinkercloud.errors import UserError
from tinkercloud.losses import load_loss
from tinkercloud.weights.adapters import Adapter

LOGIT_ROWS = 256
"""Rows whose [rows, V] logits exist at one time, in the forward and in the backward pass."""


@dataclass(slots=True)
class TrainableModel:
    """A tenant's fine-tune. Exactly one of `adapter` (LoRA) and `full` (rank 0) is not None.

    params: every trainable tensor, float32 leaves, by a flat name. grads: the accumulated gradient
    by the same names; a missing name means zero.
    """

    id: str
    base: BaseModel
    spec: LoraSpec
    adapter: Adapter | None
    full: dict[str, Tensor] | None
    params: dict[str, Tensor] = field(init=False)
    optimizer: AdamW = field(init=False)
    grads: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.full is not None:
            self.params = self.full
        else:
            self.params = {}
            for name, (a, b) in (self.adapter or {}).items():
                self.params[f"{name}.lora_A"] = a
                self.params[f"{name}.lora_B"] = b
        for param in self.params.values():
            param.requires_grad_(True)
        self.optimizer = AdamW({n: p.detach() for n, p in self.params.items()})

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank if self.spec.rank else 1.0

    def optim_step(self, hyper: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradient (cleared also when it is refused)."""
        grads, self.grads = self.grads, {}
        return self.optimizer.step(grads, hyper)


def full_parameters(base: BaseModel) -> dict[str, Tensor]:
    """float32 copies of all the base's tensors; a tied unembedding is one tensor under one name."""
    tied = base.config.tie_word_embeddings
    return {
        name: tensor.float().clone()
        for name, tensor in base.weights.items()
        if not (tied and name == "lm_head")
    }


def with_tied_head(base: BaseModel, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """`full` with the unembedding under its own name too."""
    if base.config.tie_word_embeddings:
        return {**full, "lm_head": full["model.embed_tokens"]}
    return full


def micro_batches(data: Sequence[Datum], max_tokens: int) -> Iterator[list[int]]:
    """Indices of consecutive datums whose tokens together stay within max_tokens (at least one)."""
    batch: list[int] = []
    num_tokens = 0
    for i, datum in enumerate(data):
        if batch and num_tokens + len(datum.tokens) > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(i)
        num_tokens += len(datum.tokens)
    if batch:
        yield batch


def forward_backward(
    model: TrainableModel, batch: TrainBatch, max_tokens: int
) -> Generator[None, None, TrainOutput]:
    """Yields after each micro-batch; returns the output and, unless forward_only, has added the
    gradient of the summed loss to `model.grads`. When it raises, `model.grads` is as before.
    """
    added: dict[str, Tensor] = {}
    outputs: list[dict[str, np.ndarray]] = []
    total = 0.0
    for indices in micro_batches(batch.data, max_tokens):
        data = [batch.data[i] for i in indices]
        with torch.set_grad_enabled(not batch.forward_only):
            loss, part = _micro_batch(model, data, batch, first=indices[0])
        if not batch.forward_only and loss.requires_grad:
            _accumulate(added, model.params, loss)
        total += float(loss.detach())
        outputs += part
        yield
    for name, grad in added.items():
        model.grads[name] = model.grads[name] + grad if name in model.grads else grad
    return TrainOutput(tuple(outputs), {"loss:sum": total})


def _accumulate(into: dict[str, Tensor], params: dict[str, Tensor], loss: Tensor) -> None:
    names = list(params)
    grads = torch.autograd.grad(loss, [params[n] for n in names], allow_unused=True)
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            into[name] = into[name].add_(grad) if name in into else grad


def _micro_batch(
    model: TrainableModel, data: list[Datum], batch: TrainBatch, first: int
) -> tuple[Tensor, list[dict[str, np.ndarray]]]:
    """The summed loss of these datums (float64 scalar) and their outputs."""
    base = model.base
    lengths = [len(d.tokens) for d in data]
    full = with_tied_head(base, model.full) if model.full is not None else None
    context = TrainContext(
        base.weights, lengths, adapter=model.adapter, scale=model.scale, full=full
    )
    hidden = _hidden(base, context, data, lengths)
    loss_of = load_loss(batch.loss_fn)
    losses, outputs = [], []
    for i, (datum, rows) in enumerate(zip(data, hidden.split(lengths), strict=True)):
        targets = base.tensor(datum.inputs["target_tokens"].astype(np.int64))
        logprobs = target_logprobs(base, context, rows, targets)
        inputs = {
            name: base.tensor(np.ascontiguousarray(value, dtype=np.float32))
            for name, value in datum.inputs.items()
            if name != "target_tokens"
        }
        elementwise = loss_of(logprobs, inputs, batch.loss_fn_config)
        value = elementwise.double().sum()
        if not torch.isfinite(value):
            raise UserError(
                f"the {batch.loss_fn} loss of datum {first + i} is {float(value.detach())}; the "
                "gradient of this call was dropped. Check logprobs, advantages and weights"
            )
        losses.append(value)
        output = {"logprobs": logprobs.detach().float().cpu().numpy()}
        if batch.loss_fn == "cross_entropy":
            output["elementwise_loss"] = elementwise.detach().float().cpu().numpy()
        outputs.append(output)
    return torch.stack(losses).sum(), outputs


def _hidden(
    base: BaseModel, context: TrainContext, data: list[Datum], lengths: list[int]
) -> Tensor:
    """Final hidden rows (T, D). With gradients, only each layer's input is kept; the rest of the
    layer is computed again in the backward pass when the micro-batch is one long sequence."""
    tokens = base.tensor(np.concatenate([d.tokens for d in data]).astype(np.int64))
    positions = base.tensor(np.concatenate([np.arange(n) for n in lengths]))
    arch = base.architecture
    if not torch.is_grad_enabled() or len(tokens) <= CHECKPOINT_TOKENS:
        return arch.hidden(context, tokens, positions)
    cos, sin = arch.rotary(positions)
    x = context.embed(tokens)
    for index in range(base.config.num_layers):
        x = checkpoint(arch.layer, context, index, x, cos, sin, use_reentrant=False)
    return arch.final_norm(context, x)


CHECKPOINT_TOKENS = 1024


def target_logprobs(
    base: BaseModel, context: TrainContext, hidden: Tensor, targets: Tensor
) -> Tensor:
    """log softmax at the targets, float32, shaped like `targets` (N,) or (N, K); hidden (N, D).

    The [N, V] matrix is never held: LOGIT_ROWS rows at a time, computed again for the gradient.
    """
    chunks = []
    for rows, wanted in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        if torch.is_grad_enabled():
            chunk = checkpoint(_chunk, base, context, rows, wanted, use_reentrant=False)
        else:
            chunk = _chunk(base, context, rows, wanted)
        chunks.append(chunk)
    return torch.cat(chunks)


def _chunk(base: BaseModel, context: TrainContext, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = base.architecture.unembed(context, hidden).float()
    index = targets if targets.dim() == 2 else targets[:, None]
    logprobs = logits.gather(-1, index) - torch.logsumexp(logits, -1, keepdim=True)
    return logprobs if targets.dim() == 2 else logprobs[:, 0]
