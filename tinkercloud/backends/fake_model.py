"""The language model behind the fake backend: tiny, exact, numpy only.

The logits after token t are a fixed row chosen by t plus a trainable row chosen by
`t mod NUM_BUCKETS`. A token's text is its number followed by a space.

Axes: N tokens of a datum, K alternative targets, P prompt tokens, V vocabulary, B buckets.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import (
    AdamParams,
    Datum,
    LoraSpec,
    ServedModel,
    TrainBatch,
    TrainOutput,
)
from tinkercloud.decoding.distribution import Floats, log_softmax
from tinkercloud.errors import UserError

NUM_BUCKETS = 16
BASE_RANK = 8
STATE_FILE = "fake_model.npz"


@dataclass(frozen=True, slots=True, eq=False)
class BaseWeights:
    """The frozen part: logits (V,) after token t are left[t] @ right."""

    served: ServedModel
    left: Floats
    right: Floats

    @classmethod
    def of(cls, served: ServedModel) -> "BaseWeights":
        noise = np.random.Generator(np.random.Philox(key=served.vocab_size))
        left = noise.normal(size=(served.vocab_size, BASE_RANK))
        return cls(served, left, noise.normal(size=(BASE_RANK, served.vocab_size)))

    def logprobs(self, table: Floats, tokens: NDArray) -> Floats:
        """(N, V): row i is the log-probability of every token after tokens[i]."""
        # not a matrix product: that would start threads, and round differently by batch size
        logits = np.einsum("nr,rv->nv", self.left[tokens], self.right)
        return log_softmax(logits + table[tokens % NUM_BUCKETS])

    def fresh_table(self) -> Floats:
        return np.zeros((NUM_BUCKETS, self.served.vocab_size))


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """Never changed in place, so that a published version may share its table."""

    base_model: str
    lora: LoraSpec
    table: Floats  # (B, V)
    first: Floats  # Adam's moments
    second: Floats
    step: int = 0
    gradient: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    base: BaseWeights
    table: Floats = field(repr=False)


# training


def train(base: BaseWeights, table: Floats, batch: TrainBatch) -> tuple[TrainOutput, Floats]:
    gradient = np.zeros_like(table)
    outputs: list[dict[str, NDArray[np.float32]]] = []
    total = 0.0
    for datum in batch.data:
        logprobs = base.logprobs(table, datum.tokens)
        targets = datum.inputs["target_tokens"].reshape(len(datum.tokens), -1)  # (N, K)
        scored = np.take_along_axis(logprobs, targets, axis=1)
        shaped = scored.reshape(datum.inputs["target_tokens"].shape)
        loss, slope = _loss(batch.loss_fn, shaped, datum, batch.loss_fn_config)
        total += float(loss.sum())
        gradient += _backward(logprobs, targets, slope.reshape(targets.shape), datum.tokens)
        fields = {"logprobs": shaped.astype(np.float32)}
        if batch.loss_fn == "cross_entropy":
            fields["elementwise_loss"] = loss.astype(np.float32)
        outputs.append(fields)
    return TrainOutput(tuple(outputs), {"loss:sum": total}), gradient


def _backward(logprobs: Floats, targets: NDArray, slope: Floats, tokens: NDArray) -> Floats:
    """d loss / d table (B, V), from slope = d loss / d log-probability of each target (N, K)."""
    by_logit = -np.exp(logprobs) * slope.sum(axis=1, keepdims=True)
    rows = np.arange(len(tokens))[:, None]
    np.add.at(by_logit, (rows, targets), slope)
    gradient = np.zeros((NUM_BUCKETS, logprobs.shape[1]))
    np.add.at(gradient, tokens % NUM_BUCKETS, by_logit)
    return gradient


def _loss(
    name: str, logprobs: Floats, datum: Datum, config: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """Elementwise loss and its derivative by logprobs (wire specification, section 7)."""
    if name == "cross_entropy":
        weights = datum.inputs["weights"].astype(np.float64)
        return -weights * logprobs, -weights
    behaviour = datum.inputs["logprobs"].astype(np.float64)
    advantages = datum.inputs["advantages"].astype(np.float64)
    difference = logprobs - behaviour
    if name == "dro":
        # as in losses/dro.py: a token whose advantage is 0 has no quadratic term either
        pulled = np.where(advantages == 0, 0.0, difference)
        penalty = 0.5 * config["beta"] * pulled**2
        return penalty - logprobs * advantages, config["beta"] * pulled - advantages
    if name == "stable_reinforce":
        return _stable_reinforce(difference, datum, config)
    ratio = np.exp(difference)
    if name == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    if name == "gspo":
        mask = datum.inputs["sequence_ratio_mask"] != 0
        mean = difference[mask].mean() if mask.any() else 0.0
        ratio = np.full_like(difference, np.exp(mean))
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if name == "cispo":
        return -clipped * logprobs * advantages, -clipped * advantages
    plain, bounded = ratio * advantages, clipped * advantages
    return -np.minimum(plain, bounded), np.where(plain <= bounded, -plain, 0.0)


def _stable_reinforce(
    difference: Floats, datum: Datum, config: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """As `losses.stable_reinforce` has it."""
    bound, kl_coeff = config["clip_high_threshold"], config["kl_coeff"]
    advantages = datum.inputs["advantages"].astype(np.float64)
    active = (advantages != 0) | ((datum.inputs["sampled_mask"] != 0) & (kl_coeff != 0))
    difference = np.where(active, difference, 0.0)
    weight = np.exp(np.minimum(difference, np.log(bound)))
    value = weight + bound * np.maximum(difference - np.log(bound), 0.0)
    loss = -value * advantages + kl_coeff * (value - 1.0 - difference)
    slope = -weight * advantages + kl_coeff * (weight - 1.0)
    return np.where(active, loss, 0.0), np.where(active, slope, 0.0)


def adamw(model: ModelState, gradient: Floats, params: AdamParams) -> ModelState:
    step = model.step + 1
    first = params.beta1 * model.first + (1 - params.beta1) * gradient
    second = params.beta2 * model.second + (1 - params.beta2) * gradient**2
    mean = first / (1 - params.beta1**step)
    root = np.sqrt(second / (1 - params.beta2**step)) + params.eps
    table = model.table * (1 - params.learning_rate * params.weight_decay)
    table = table - params.learning_rate * mean / root
    return replace(model, table=table, first=first, second=second, step=step)


def write_state(model: ModelState, directory: Path, *, with_optimizer: bool) -> None:
    about = {"lora": asdict(model.lora), "base_model": model.base_model, "step": model.step}
    arrays: dict[str, NDArray] = {"table": model.table}
    if with_optimizer:
        arrays |= {"first": model.first, "second": model.second}
    header = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    arrays["about"] = header
    np.savez(directory / STATE_FILE, allow_pickle=False, **arrays)


def read_state(directory: Path) -> ModelState:
    # numpy leaves a damaged file open
    with (directory / STATE_FILE).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        about = json.loads(file["about"].tobytes())
        table = file["table"]
        first = file["first"] if "first" in file else np.zeros_like(table)
        second = file["second"] if "second" in file else np.zeros_like(table)
    lora = LoraSpec(**about["lora"])
    return ModelState(about["base_model"], lora, table, first, second, about["step"])


def check_fits(checkpoint: ModelState, base: BaseWeights) -> None:
    if checkpoint.table.shape != base.fresh_table().shape:
        raise UserError(
            f"this checkpoint of {checkpoint.base_model!r} does not fit {base.served.name!r}"
        )
