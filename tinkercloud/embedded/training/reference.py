"""One micro-batch under autograd, by the architecture's own code: slow, obvious, for any network.

`micro_batch_pass` is compared with it, and it trains architectures whose blocks are not written out
in `block`.

Axes: T packed rows, N rows of one datum, K targets per position, D hidden, V vocabulary.
"""

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkercloud.core.types import Datum
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.embedded.training.linear import ModelWeights, parameter_name
from tinkercloud.embedded.training.micro_batch_pass import Share
from tinkercloud.errors import UserError
from tinkercloud.losses import load_loss

LOGIT_ROWS = 256


def run_reference(
    base: BaseModel, shares: Sequence[Share], *, recompute: bool
) -> Generator[None, None, None]:
    """As `micro_batch_pass.run_pass`; each share by itself, yielding after each."""
    for share in shares:
        with torch.set_grad_enabled(not share.batch.forward_only):
            loss = _forward(base, share, recompute=recompute)
        if loss is not None and loss.requires_grad:
            _add_gradients(share.model, loss)
        yield


def _add_gradients(model: ModelWeights, loss: Tensor) -> None:
    params: dict[str, Tensor] = {}
    for name, (a, b) in (model.adapter or {}).items():
        params |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
    for name, tensor in (model.full or {}).items():
        params[parameter_name(model.full or {}, name)] = tensor
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    for (name, param), grad in zip(params.items(), grads, strict=True):
        if grad is not None:
            model.grad(name, param).add_(grad)


def _forward(base: BaseModel, share: Share, *, recompute: bool) -> Tensor | None:
    """Fills the share's outputs; the summed loss, or None after an error."""
    data = [share.batch.data[i] for i in share.indices]
    lengths = [len(datum.tokens) for datum in data]
    model = share.model
    context = TrainContext(
        base.weights, lengths, adapter=model.adapter, scale=model.scale, full=model.full
    )
    hidden = _hidden(base, context, data, recompute=recompute)
    losses = []
    for i, rows in enumerate(hidden.split(lengths)):
        value = _datum_loss(base, context, share, data[i], rows)
        if not torch.isfinite(value):
            share.error = UserError(
                f"the {share.batch.loss_fn} loss of datum {share.indices[i]} is {float(value)}; "
                "the gradient of this call was dropped. Check logprobs, advantages and weights"
            )
            return None
        losses.append(value)
    total = torch.stack(losses).sum()
    share.loss = float(total.detach())
    return total


def _datum_loss(
    base: BaseModel, context: TrainContext, share: Share, datum: Datum, hidden: Tensor
) -> Tensor:
    targets = base.tensor(datum.inputs["target_tokens"].astype(np.int64))
    logprobs = target_logprobs(base, context, hidden, targets)
    inputs = {
        name: base.tensor(np.ascontiguousarray(value, dtype=np.float32))
        for name, value in datum.inputs.items()
        if name != "target_tokens"
    }
    elementwise = load_loss(share.batch.loss_fn)(logprobs, inputs, share.batch.loss_fn_config)
    output = {"logprobs": logprobs.detach().float().cpu().numpy()}
    if share.batch.loss_fn == "cross_entropy":
        output["elementwise_loss"] = elementwise.detach().float().cpu().numpy()
    share.outputs.append(output)
    return elementwise.double().sum()


def _hidden(
    base: BaseModel, context: TrainContext, data: list[Datum], *, recompute: bool
) -> Tensor:
    """Final hidden rows (T, D)."""
    tokens = base.tensor(np.concatenate([d.tokens for d in data]).astype(np.int64))
    positions = base.tensor(np.concatenate([np.arange(len(d.tokens)) for d in data]))
    arch = base.architecture
    if not (torch.is_grad_enabled() and recompute):
        return arch.hidden(context, tokens, positions)
    cos, sin = arch.rotary(positions)
    x = arch.embed(context, tokens)
    for index in range(base.config.num_layers):
        x = checkpoint(arch.layer, context, index, x, cos, sin, use_reentrant=False)
    return arch.final_norm(context, x)


def target_logprobs(
    base: BaseModel, context: TrainContext, hidden: Tensor, targets: Tensor
) -> Tensor:
    """log softmax at the targets, float32, shaped like `targets` (N,) or (N, K); hidden (N, D)."""
    chunks = []
    for rows, ids in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        if torch.is_grad_enabled():  # the logits of a chunk only, never those of all rows
            chunk = checkpoint(_chunk, base, context, rows, ids, use_reentrant=False)
        else:
            chunk = _chunk(base, context, rows, ids)
        chunks.append(chunk)
    return torch.cat(chunks)


def _chunk(base: BaseModel, context: TrainContext, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = base.architecture.unembed(context, hidden).float()
    index = targets if targets.dim() == 2 else targets[:, None]
    logprobs = logits.gather(-1, index) - torch.logsumexp(logits, -1, keepdim=True)
    return logprobs if targets.dim() == 2 else logprobs[:, 0]
