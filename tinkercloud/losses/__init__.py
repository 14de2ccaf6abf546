"""Losses by name. This table needs no torch, so that requests are checked before any computing.

Each file defines `loss(logprobs, inputs, config) -> Tensor`: per-element loss of ONE datum, same
shape as `logprobs` (N,) or (N, K), whose sum is the datum's contribution to `loss:sum`.
`logprobs` is the policy's log-probability of each target (requires grad), `inputs` the datum's
tensors, `config` complete. Formulas: wire specification, section 7.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from tinkercloud.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    Loss = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """target: "module:function". inputs: float32 inputs besides target_tokens, shaped like
    target_tokens. defaults: the loss_fn_config keys that are known, with their values.
    multi_target: whether target_tokens may be (N, K). absent: the inputs that a datum may leave
    out, with the value that every token then has. recorded_inputs: those of inputs that come from
    the record of the samples that the datum's provenance names, not from the client.
    ignored_inputs: what clients may send and nobody reads."""

    target: str
    inputs: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    multi_target: bool = False
    absent: Mapping[str, float] = field(default_factory=dict[str, float])
    recorded_inputs: tuple[str, ...] = ()
    ignored_inputs: tuple[str, ...] = ()

    @property
    def sent_inputs(self) -> tuple[str, ...]:
        """What the client must send besides target_tokens."""
        return tuple(name for name in self.inputs if name not in self.recorded_inputs)

    @property
    def needs_provenance(self) -> bool:
        return bool(self.recorded_inputs)


_RL = ("logprobs", "advantages")

LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        "tinkercloud.losses.cross_entropy:loss",
        ("weights",),
        multi_target=True,
        absent={"weights": 1.0},
    ),
    "importance_sampling": LossSpec("tinkercloud.losses.importance_sampling:loss", _RL),
    "ppo": LossSpec(
        "tinkercloud.losses.ppo:loss",
        _RL,
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": LossSpec(
        "tinkercloud.losses.cispo:loss",
        _RL,
        {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": LossSpec("tinkercloud.losses.dro:loss", _RL, {"beta": 0.05}),
    "gspo": LossSpec(
        "tinkercloud.losses.gspo:loss",
        (*_RL, "sequence_ratio_mask"),
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "stable_reinforce": LossSpec(
        "tinkercloud.losses.stable_reinforce:loss",
        (*_RL, "sampled_mask"),
        {"clip_high_threshold": 2.0, "kl_coeff": 0.0},
        recorded_inputs=("logprobs", "sampled_mask"),
        ignored_inputs=("logprobs",),
    ),
}


def trained_input(name: str, config: Mapping[str, float]) -> str:
    """The input of a loss that is not 0 exactly at the elements that have a gradient."""
    if name == "cross_entropy":
        return "weights"
    return "sampled_mask" if config.get("kl_coeff") else "advantages"


def load_loss(name: str) -> "Loss":
    """The function of the loss `name`; imports torch. Raises InvalidRequest for an unknown one."""
    if name not in LOSSES:
        raise InvalidRequest(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    module, _, attribute = LOSSES[name].target.partition(":")
    return getattr(import_module(module), attribute)
