"""One micro-batch, forward and backward, written out: without a tape little memory is held.

A pass may have datums of several LoRA models of one base: the products with the base's weights are
then shared, everything else is computed for each model. It yields often, so that its owner can do
other work in between.

Axes: T packed rows, D hidden.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import TrainBatch
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.train_bindings import has_compiled_pass
from tinkercloud.embedded.training.block import BlockActivations, Blocks
from tinkercloud.embedded.training.compiled_blocks import CompiledBlocks, CompiledUnembedding
from tinkercloud.embedded.training.head import LOGIT_ROWS, Head, Unembedding
from tinkercloud.embedded.training.layout import lay_out
from tinkercloud.embedded.training.linear import Linears, ModelWeights, Segment
from tinkercloud.embedded.training.observer import ErrorIsolatingObserver, PassObserver
from tinkercloud.embedded.training.targets import arrange
from tinkercloud.embedded.training.torch_blocks import TorchBlocks, TorchUnembedding
from tinkercloud.errors import UserError


@dataclass(slots=True)
class Share:
    """One model's datums in a pass, and their results.

    indices: of batch.data. model.grads receives the gradient, unless the batch is forward_only.
    With an `error` the gradient is worthless; other shares are not affected.
    """

    model: ModelWeights
    batch: TrainBatch
    indices: Sequence[int]
    loss: float = 0.0
    outputs: list[dict[str, NDArray[np.float32]]] = field(default_factory=list)
    error: UserError | None = None


def run_pass(
    base: BaseModel,
    shares: Sequence[Share],
    *,
    recompute: bool,
    observer: PassObserver | None = None,
) -> Generator[None, None, None]:
    """All shares train, or all are forward_only. recompute: keep each block's input only, and
    compute its other activations again in the backward pass. observer: of passes that train."""
    pass_ = _Pass(base, shares, ErrorIsolatingObserver(observer))
    steps = pass_.forward_only() if shares[0].batch.forward_only else pass_.train(recompute)
    while True:
        # Grad mode belongs to the thread: it must not be off while other work runs at a yield.
        with torch.no_grad():
            try:
                next(steps)
            except StopIteration:
                return
        yield


class _Pass:
    def __init__(self, base: BaseModel, shares: Sequence[Share], observer: ErrorIsolatingObserver):
        self._base, self._shares, self._observer = base, shares, observer
        models = [share.model for share in shares]
        is_compiled = has_compiled_pass(base.device, base.dtype)
        data = [[share.batch.data[i] for i in share.indices] for share in shares]
        layout = lay_out(data)
        self._tokens = base.tensor(layout.tokens)
        self._linears = Linears(base.weights, models)
        # The padding is a sequence of its own, in no model's segment and without gradient.
        segments = [Segment(model, *layout.span(i)) for i, model in enumerate(models)]
        num_logits = min(LOGIT_ROWS, len(layout.tokens))
        self._blocks: Blocks
        unembedding: Unembedding
        if is_compiled:
            self._blocks = blocks = CompiledBlocks(base, layout, self._linears, segments)
            unembedding = CompiledUnembedding(base, blocks, num_logits)
        else:
            self._blocks = TorchBlocks(base, layout, self._linears, segments)
            unembedding = TorchUnembedding(base, self._linears, num_logits)
        datums = [(share.batch, share.indices) for share in shares]
        self._targets, order = arrange(base, datums, layout)
        self._head = Head(self._linears, models, unembedding, self._targets, order)
        self._observer.begin(datums, layout)

    def forward_only(self) -> Generator[None, None, None]:
        x = self._blocks.embed()
        for index in range(self._base.config.num_layers):
            x, _ = self._blocks.forward(index, x, keep=False)
            yield
        yield from self._head.forward(self._blocks.final_norm(x))
        self._finish()

    def train(self, recompute: bool) -> Generator[None, None, None]:
        num_layers = self._base.config.num_layers
        reached = any(map(_reaches_blocks, (share.model for share in self._shares)))
        kept: list[BlockActivations | Tensor | None] = []
        x = self._blocks.embed()
        for index in range(num_layers):
            before = x
            x, saved = self._blocks.forward(index, x, keep=reached and not recompute)
            kept.append(saved if saved is not None else before if reached else None)
            if index + 1 < num_layers:
                self._observer.block(index + 1, x)
            yield
        hidden = self._blocks.final_norm(x)
        self._observer.block(num_layers, hidden)
        dhidden = torch.zeros_like(hidden)
        show = self._observer.distributions if self._observer.watches else None
        yield from self._head.forward_backward(hidden, dhidden, show)
        self._finish()
        self._observer.end()
        if not reached or all(share.error is not None for share in self._shares):
            return
        dx = self._blocks.final_norm_backward(x, dhidden)
        del x, hidden, dhidden
        yield from self._blocks_backward(kept, dx)

    def _blocks_backward(
        self, kept: list[BlockActivations | Tensor | None], dx: Tensor
    ) -> Generator[None, None, None]:
        trains_embedding = self._linears.trains("model.embed_tokens")
        for index in reversed(range(len(kept))):
            saved = kept.pop()
            if isinstance(saved, Tensor):
                _, saved = self._blocks.forward(index, saved, keep=True)
            assert saved is not None
            wants_dx = index > 0 or trains_embedding
            below = self._blocks.backward(index, saved, dx, wants_dx=wants_dx)
            if below is not None:
                dx = below
            yield
        scale = self._base.config.embedding_scale
        self._linears.add_embedding_gradient(self._tokens, dx, scale)

    def _finish(self) -> None:
        for share, targets in zip(self._shares, self._targets, strict=True):
            try:
                share.loss, share.outputs = targets.finish()
            except UserError as error:
                share.error = error


def _reaches_blocks(model: ModelWeights) -> bool:
    """Whether any weight before the unembedding is trained."""
    return model.adapter is None or any(name != "lm_head" for name in model.adapter)
