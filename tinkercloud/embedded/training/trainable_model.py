"""A tenant's fine-tune: its weights, the gradient accumulated until a step, its optimizer.

Gradients are computed by `queue` (which model is next) and `micro_batch_pass` (one micro-batch).
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from tinkercloud.core.types import AdamParams, LoraSpec
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.packed import pack_weights
from tinkercloud.embedded.native.train_bindings import has_compiled_pass, training_team
from tinkercloud.embedded.training.linear import ModelWeights
from tinkercloud.embedded.training.micro_batches import KeptBytes, kept_bytes
from tinkercloud.embedded.training.optimizer import AdamW
from tinkercloud.weights.adapters import Adapter


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
        self.optimizer = AdamW({n: p.detach() for n, p in self.params.items()})

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank if self.spec.rank else 1.0

    def weights(self, grads: dict[str, Tensor] | None = None) -> ModelWeights:
        """For a pass; grads: what it adds to. Full weights are rounded to the base's type, and
        packed, once after each step, not in each pass."""
        added = {} if grads is None else grads
        if self._weights is None:
            self._weights = self._pass_weights()
        return replace(self._weights, grads=added)

    def _pass_weights(self) -> ModelWeights:
        base = self.base
        is_compiled = has_compiled_pass(base.device, base.dtype)
        if self.full is None:
            packed = None
            if is_compiled:
                with training_team() as team:
                    packed = base.packed(team)
            return ModelWeights(self.adapter, self.scale, None, None, packed)
        full = with_tied_head(base, self.full)
        rounded = {n: t.detach().to(base.dtype) for n, t in self.full.items()}
        values = with_tied_head(base, rounded)
        if not is_compiled:
            return ModelWeights(None, self.scale, full, values, None)
        with training_team() as team:
            packed = pack_weights(team, values)
        vectors = {name: value for name, value in values.items() if value.dim() == 1}
        return ModelWeights(None, self.scale, full, vectors, packed)

    def kept_bytes(self) -> KeptBytes:
        """Of the activations that a pass keeps for its backward half."""
        base = self.base
        is_compiled = has_compiled_pass(base.device, base.dtype)
        return kept_bytes(base.config, base.dtype.itemsize, is_compiled=is_compiled)

    def optim_step(self, hyper: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradient, which is cleared also when it is refused."""
        grads, self.grads = self.grads, {}
        self._weights = None
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
