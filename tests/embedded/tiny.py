"""A tiny random Llama, saved by transformers, and the ways tests drive our engine with it."""

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromModel,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TrainBatch,
    TrainOutput,
)
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.embedded.training.trainable_model import TrainableModel

EOS = 256
VOCAB = 260


def write_tiny_family(folder: Path, family: str) -> Path:
    """As `write_tiny_model`, of another family, with all its switches on."""
    from tests.architectures.networks import random_network  # GGUF's package is not always there

    sizes = {"hidden_size": 48, "num_attention_heads": 6, "max_position_embeddings": 1024}
    tokens = {"vocab_size": VOCAB, "eos_token_id": EOS, "bos_token_id": 257}
    random_network(family, **sizes, **tokens).save_pretrained(folder)
    return _write_tokenizer(folder)


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Two layers, grouped heads, a byte-level tokenizer: token i < 256 is one byte."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=EOS, bos_token_id=257, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Flat random logits would hide faults: make the distributions peaked.
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<eos>": 256, "<bos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class TinyStore(ModelStore):
    """With the limits of micro-batches that `train` keeps to."""

    def __init__(self, load: Callable[[str], BaseModel], versions: VersionCache, limits: Limits):
        super().__init__(load, versions)
        self.limits = limits


def open_store(
    folder: Path,
    tokens: int = 1024,
    versions_bytes: int = 2**30,
    activation_bytes: int = 2**31,
    dtype: torch.dtype = torch.float32,
) -> TinyStore:
    """A ModelStore that serves the folder as "tiny"."""

    def load(name: str) -> BaseModel:
        return BaseModel.load(name, folder, folder, dtype, torch.device("cpu"))

    versions = VersionCache(Path(tempfile.mkdtemp(dir=folder)), versions_bytes)
    return TinyStore(load, versions, Limits(tokens, activation_bytes))


def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Sampler:
    """A SamplingEngine run to its end for every call."""

    def __init__(self, store: ModelStore, **limits: int):
        self.store = store
        self.engine = SamplingEngine(**{"max_batch": 64, "kv_cache_bytes": 2**30} | limits)

    def run(self, requests: Mapping[str, tuple[str, SampleRequest]]) -> dict[str, SampleOutput]:
        """name -> (version, request); all of them at once."""
        outputs: dict[str, SampleOutput | BaseException] = {}
        for name, (version, request) in requests.items():
            self.engine.submit(
                self.store.version(version), request, lambda o, n=name: outputs.__setitem__(n, o)
            )
        while self.engine.busy:
            self.engine.step()
        return outputs

    def one(self, version: str, request: SampleRequest) -> SampleOutput:
        return self.run({"only": (version, request)})["only"]


def ask(prompt: list[int], n: int = 1, max_tokens: int = 8, **more: object) -> SampleRequest:
    """A SampleRequest; keyword arguments go to SamplingParams or, failing that, the request."""
    own = {k: more.pop(k) for k in list(more) if k in SamplingParams.__dataclass_fields__}
    params = SamplingParams(max_tokens=max_tokens, **{"seed": 0} | own)
    return SampleRequest(np.array(prompt, np.int32), n, params, **more)


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def supervised(length: int, seed: int, weight: float = 1.0) -> Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, length + 1)
    weights = np.full(length, weight, np.float32)
    weights[: length // 3] = 0
    return Datum(
        tokens[:-1].astype(np.int32),
        {"target_tokens": tokens[1:].astype(np.int64), "weights": weights},
    )


def train_alone(model: TrainableModel, batch: TrainBatch, limits: Limits) -> TrainOutput:
    """One call by itself. Raises its error."""
    queue = TrainingQueue(limits)
    queue.add(0, model, batch)
    (call,) = queue.step(math.inf)
    if call.error is not None:
        raise call.error
    return call.output


def train(
    store: TinyStore, model_id: str, data: list[Datum], loss: str = "cross_entropy", **more: object
) -> TrainOutput:
    """Keyword arguments go to TrainBatch."""
    batch = TrainBatch(tuple(data), loss, **more)
    return train_alone(store.model(model_id), batch, store.limits)


def grads(store: ModelStore, model_id: str) -> dict[str, torch.Tensor]:
    return {n: g.clone() for n, g in store.model(model_id).grads.items()}


def params(store: ModelStore, model_id: str) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in store.model(model_id).params.items()}


def tuned(store: ModelStore, model_id: str, rank: int, seed: int = 1) -> str:
    """A version that differs from the base."""
    store.create_model(model_id, "tiny", LoraSpec(rank=rank, seed=seed))
    train(store, model_id, [supervised(20, seed)])
    store.optim_step(model_id, AdamParams(learning_rate=0.02))
    return store.publish(FromModel(model_id))


def same(one: SampleOutput, other: SampleOutput) -> None:
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.logprobs, b.logprobs)


def expected_distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """The sampled distribution, written as the definition reads (float64 probabilities)."""
    probs = torch.softmax(logits / temperature, -1)
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    if top_k > 0:
        order = order[:top_k]
    mass = sum(float(probs[i]) for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += float(probs[i]) / mass
        if reached >= top_p:
            break
    out = torch.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out
