"""How much memory 2,048 tokens take to be scored, over a vocabulary of 49,152; one line of JSON.

python -m tests.embedded.sampling.scored_memory FOLDER
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.peak_memory import PeakMemory
from tinkercloud.architectures.config import from_hf
from tinkercloud.core.types import (
    Datum,
    FromBase,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue

NUM_TOKENS, VOCAB = 2048, 49_152
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def open_store(folder: Path) -> ModelStore:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in from_hf(CONFIG).weight_shapes().items()
        if name != "lm_head"
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))

    def load(name: str) -> BaseModel:
        return BaseModel.load(name, folder, None, torch.bfloat16, torch.device("cpu"))

    return ModelStore(load, VersionCache(folder / "versions", 2**30))


def by_the_sampler(store: ModelStore, tokens: np.ndarray) -> np.ndarray:
    """The log-probabilities of a prompt, without its first token's."""
    outputs: list[SampleOutput | BaseException] = []
    engine = SamplingEngine(max_batch=4, kv_cache_bytes=2**20, num_threads=2)
    request = SampleRequest(tokens, 1, SamplingParams(1, 0), prompt_logprobs=True)
    engine.submit(store.version(store.publish(FromBase("tiny"))), request, outputs.append)
    while engine.busy:
        engine.step()
    (output,) = outputs
    assert isinstance(output, SampleOutput)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs[1:]


def by_the_trainer(store: ModelStore, tokens: np.ndarray) -> np.ndarray:
    """The same of a datum."""
    weights = np.ones(len(tokens) - 1, np.float32)
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": weights}
    queue = TrainingQueue(Limits())
    datum = Datum(tokens[:-1], inputs)
    queue.add(0, store.model("m"), TrainBatch((datum,), "cross_entropy", forward_only=True))
    (call,) = queue.step(math.inf)
    assert call.error is None
    assert call.output is not None
    return call.output.outputs[0]["logprobs"]


def peak_of(score: Callable[[np.ndarray], np.ndarray], tokens: np.ndarray) -> tuple[int, float]:
    """The most bytes above those before, once what stays has been made by a short text; and the sum
    of the log-probabilities."""
    score(tokens[:40])
    peak = PeakMemory()
    with peak.measured():
        logprobs = score(tokens)
    return peak.num_bytes, float(logprobs.astype(np.float64).sum())


def main() -> None:
    torch.set_num_threads(2)
    store = open_store(Path(sys.argv[1]))
    store.create_model("m", "tiny", LoraSpec(rank=2, seed=0))
    tokens = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS).astype(np.int32)
    results = {
        "sampler": peak_of(lambda some: by_the_sampler(store, some), tokens),
        "trainer": peak_of(lambda some: by_the_trainer(store, some), tokens),
    }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
