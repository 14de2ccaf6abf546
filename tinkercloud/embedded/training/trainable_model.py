"""A tenant's fine-tune: its weights, the gradient accumulated until a step, its optimizer.

Gradients are computed by `queue` (which model is next) and `micro_batch_pass` (one micro-batch).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tinkercloud.core.types import AdamParams, LoraSpec
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.huge_pages import in_huge_pages
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.native.bindings import AdapterTable
from tinkercloud.embedded.native.train_bindings import has_compiled_pass, training_team
from tinkercloud.embedded.training.linear import ModelWeights
from tinkercloud.embedded.training.micro_batches import KeptBytes, kept_bytes
from tinkercloud.embedded.training.optimizer import AdamW
from tinkercloud.embedded.training.parts import Between, nothing
from tinkercloud.errors import GradientNotFinite
from tinkercloud.weights.adapters import Adapter


@dataclass(slots=True)
class TrainableModel:
    """A tenant's fine-tune. Exactly one of `adapter` (LoRA) and `full` (rank 0) is not None.

    params: every trainable tensor, float32 leaves, by a flat name. grads: the accumulated gradient
    by the same names; a missing name means zero. between: is called between the parts of long work
    on the tensors.
    """

    id: str
    base: BaseModel
    spec: LoraSpec
    adapter: Adapter | None
    full: dict[str, Tensor] | None
    between: Between = nothing
    params: dict[str, Tensor] = field(init=False)
    optimizer: AdamW = field(init=False)
    grads: dict[str, Tensor] = field(default_factory=dict)
    _weights: ModelWeights | None = field(init=False, default=None)

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
        # It has no way back to the model: memory in a cycle is freed by the garbage collector,
        # which hardly ever runs in a process that rests.
        self.optimizer = AdamW({n: p.detach() for n, p in self.params.items()}, self.between)

    def yield_to(self, between: Between) -> None:
        self.between = self.optimizer.between = between

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank if self.spec.rank else 1.0

    def weights(self, grads: dict[str, Tensor] | None = None) -> ModelWeights:
        """For a pass; grads: what it adds to. Full weights are rounded to the base's type, and
        all are packed, once after each step, not in each pass."""
        added = {} if grads is None else grads
        if self._weights is None:
            self._weights = self._pass_weights()
        return replace(self._weights, grads=added)

    def _pass_weights(self) -> ModelWeights:
        base = self.base
        is_compiled = has_compiled_pass(base.device, base.dtype)
        if self.full is None:
            packed = factors = None
            if is_compiled:
                assert isinstance(base.weights, PackedTensors), "packed where there are the kernels"
                packed = base.weights.packed
                with training_team() as team:
                    factors = AdapterTable(team, self.adapter or {}, base.config.num_layers)
            return ModelWeights(self.adapter, self.scale, None, None, packed, factors)
        full = with_tied_head(base, self.full)
        rounded = ((n, t.detach().to(base.dtype)) for n, t in self.full.items())
        if is_compiled:
            assert isinstance(base.weights, PackedTensors), "packed where there are the kernels"
            values = PackedTensors.of(rounded).with_salient(base.weights.salient_inputs)
            return ModelWeights(None, self.scale, full, values, values.packed, None)
        return ModelWeights(None, self.scale, full, with_tied_head(base, dict(rounded)), None, None)

    def published(self) -> Mapping[str, Tensor]:
        """Full weights in the base's number type, which no later step changes. Packed ones are
        those that a pass reads: both have the same memory until the next step."""
        assert self.full is not None, "adapters are published without the base's weights"
        values = self.weights().values
        return values if isinstance(values, PackedTensors) else frozen(self.base, self.full)

    def kept_bytes(self) -> KeptBytes:
        """Of the activations that a pass keeps for its backward half."""
        base = self.base
        is_compiled = has_compiled_pass(base.device, base.dtype)
        return kept_bytes(base.config, base.dtype.itemsize, is_compiled=is_compiled)

    def optim_step(self, hyper: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradient. Raises GradientNotFinite, which clears it too,
        and WeightsNotFinite, which leaves the model as it is."""
        try:
            metrics = self.optimizer.step(self.grads, hyper)
        except GradientNotFinite:
            self.grads = {}
            raise
        self.grads, self._weights = {}, None
        return metrics


def full_parameters(base: BaseModel) -> dict[str, Tensor]:
    """float32 copies of all the base's tensors; a tied unembedding is one tensor under one name."""
    tied = base.config.tie_word_embeddings
    return {
        name: tensor.to(torch.float32, copy=True)
        for name, tensor in base.weights.items()
        if not (tied and name == "lm_head")
    }


def frozen(base: BaseModel, full: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A copy of full weights in the base's number type, held as the base's are."""
    if isinstance(base.weights, PackedTensors):
        rounded = ((n, t.detach().to(base.dtype)) for n, t in full.items())
        return PackedTensors.of(rounded).with_salient(base.weights.salient_inputs)
    copies = {n: t.detach().to(base.dtype, copy=True) for n, t in full.items()}
    in_huge_pages(copies)
    return with_tied_head(base, copies)


def with_tied_head(base: BaseModel, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """`full` with the unembedding under its own name too."""
    if base.config.tie_word_embeddings:
        return {**full, "lm_head": full["model.embed_tokens"]}
    return full
