"""How far the trainer's log-probabilities are from the sampler's on this machine, measured.

A model is trained for a step, published, sampled and scored by the trainer's pass, as a server
does it. Where both call the compiled pass every difference is 0; elsewhere they round differently.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tinkercloud.architectures.config import from_hf
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromModel,
    LoraSpec,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import train_alone

RANK, LEARNING_RATE = 8, 3e-3
VERSION_BYTES, KV_CACHE_BYTES = 2**30, 2**29
TINY_PROMPTS = (5, 64, 150)
"""Tokens of each: less than a unit of attention, a whole one, and some."""
_NAME = "model"


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of |trained - sampled| log-probabilities, in nats, over all sampled tokens."""

    num_tokens: int
    mean: float
    p99: float
    largest: float

    @classmethod
    def of(cls, differences: NDArray[np.float64]) -> "Deviation":
        """differences (n,), n >= 1."""
        apart = np.abs(differences)
        p99 = float(np.quantile(apart, 0.99))
        return cls(len(apart), float(apart.mean()), p99, float(apart.max()))


def measure(
    base: BaseModel,
    prompts: Sequence[Sequence[int]],
    num_sampled: int,
    num_threads: int,
    folder: Path,
) -> Deviation:
    """Each prompt is trained on, and continued by one sample of `num_sampled` tokens; all at once.
    folder: for files. Raises the error of a sample or of a call."""
    store = ModelStore(lambda _: base, VersionCache(folder / "versions", VERSION_BYTES))
    store.create_model(_NAME, base.name, LoraSpec(rank=RANK, seed=0))
    model = store.model(_NAME)
    batch = TrainBatch(tuple(_datum(prompt) for prompt in prompts), "cross_entropy")
    train_alone(model, batch, Limits())
    store.optim_step(_NAME, AdamParams(learning_rate=LEARNING_RATE))
    version = store.version(store.publish(FromModel(_NAME)))
    samples = _sample(version, prompts, num_sampled, num_threads)
    texts = zip(prompts, samples, strict=True)
    data = tuple(_datum([*prompt, *sample.tokens.tolist()]) for prompt, sample in texts)
    trained = train_alone(model, TrainBatch(data, "cross_entropy", forward_only=True), Limits())
    pairs = zip(samples, trained.outputs, strict=True)
    return Deviation.of(np.concatenate([_differences(*pair) for pair in pairs]))


def measure_tiny(
    dtype: torch.dtype, device: torch.device, num_threads: int, folder: Path
) -> Deviation:
    """`measure` of a network of random weights: in a second or two, by the passes that a served
    model of this number type would take."""
    base = tiny_base(dtype, device)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, base.config.vocab_size, length) for length in TINY_PROMPTS]
    return measure(base, [prompt.tolist() for prompt in prompts], 80, num_threads, folder)


def tiny_base(dtype: torch.dtype, device: torch.device) -> BaseModel:
    """Two layers of the Llama family, more than a thousand tokens, and distributions over them that
    are neither flat nor certain."""
    config = from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 1500,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
        }
    )
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in config.weight_shapes().items():
        weight = torch.ones(shape)
        if weight.dim() > 1:
            weight = torch.randn(shape, generator=random) * 2 / math.sqrt(shape[1])
        weights[name] = weight.to(device, dtype)
    return BaseModel.of("tiny", config, weights.items(), dtype, device)


def _datum(tokens: Sequence[int]) -> Datum:
    """Every token after the first is predicted."""
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "weights": np.ones(len(tokens) - 1, np.float32),
    }
    return Datum(np.array(tokens[:-1], np.int32), inputs)


def _sample(
    version: Version, prompts: Sequence[Sequence[int]], num_sampled: int, num_threads: int
) -> list[SampledSequence]:
    """One of each prompt, at temperature 1 over the whole vocabulary."""
    engine = SamplingEngine(
        max_batch=len(prompts), kv_cache_bytes=KV_CACHE_BYTES, num_threads=num_threads
    )
    outputs: dict[int, SampleOutput | BaseException] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(num_sampled, seed=number, use_eos=False)
        request = SampleRequest(np.array(prompt, np.int32), 1, params)
        engine.submit(version, request, partial(outputs.__setitem__, number))
    while engine.busy:
        engine.step()
    return [_only(outputs[number]) for number in range(len(prompts))]


def _only(output: SampleOutput | BaseException) -> SampledSequence:
    if isinstance(output, BaseException):
        raise output
    return output.sequences[0]


def _differences(
    sample: SampledSequence, trained: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float64]:
    """trained: the output of the datum that ends with the sample's tokens."""
    scored = trained["logprobs"][-len(sample.tokens) :]
    return scored.astype(np.float64) - sample.logprobs
