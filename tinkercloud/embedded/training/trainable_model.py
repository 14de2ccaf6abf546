"""A tenant's fine-tune: its weights, the gradient accumulated until a step, its optimizer.

Gradients are computed by `queue` (which model is next) and `micro_batch_pass` (one micro-batch).
"""

from dataclasses import dataclass, field

from torch import Tensor

from tinkercloud.core.types import AdamParams, LoraSpec
from tinkercloud.embedded.model.base_model import BaseModel
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

    def full_weights(self) -> dict[str, Tensor] | None:
        """The trainable weights under all names that the architecture reads, or None."""
        return with_tied_head(self.base, self.full) if self.full is not None else None

    def kept_bytes(self) -> KeptBytes:
        """Of the activations that a pass keeps for its backward half."""
        return kept_bytes(self.base.config, self.base.dtype.itemsize, self.spec.rank)

    def optim_step(self, hyper: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradient, which is cleared also when it is refused."""
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
