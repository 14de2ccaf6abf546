"""How much memory a model takes while it is loaded, sampled and trained; one line of JSON.

python -m tests.embedded.model.one_copy FOLDER DTYPE
"""

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.peak_memory import PeakMemory, resident_bytes
from tinkercloud.architectures.config import from_hf
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromModel,
    LoraSpec,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.embedded.model import packed_tensors
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16_384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SHAPES = from_hf(CONFIG).weight_shapes()


@dataclass(frozen=True)
class Memory:
    """Of the process, above what it had before the model. copy_bytes: of one copy of the matrices;
    loading_bytes: the most after any matrix; loaded_bytes: when all are there; used_bytes: the
    most while samples and training steps run."""

    copy_bytes: int
    loading_bytes: int
    loaded_bytes: int
    used_bytes: int


def num_held(dtype: torch.dtype) -> int:
    """Weights, and in bfloat16 those of some inputs of each matrix once more."""
    again = packed_tensors.NUM_SALIENT if dtype == torch.bfloat16 else 0
    return sum(shape[0] * (shape[1] + again) for shape in SHAPES.values() if len(shape) == 2)


def write_model(folder: Path) -> None:
    """Random, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in SHAPES.items():
        noise = torch.randn(shape, generator=generator) * 0.03
        tensors[f"{name}.weight"] = (noise + (len(shape) == 1)).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def measured(folder: Path, dtype: torch.dtype) -> Memory:
    store = open_store(folder, dtype)
    start, while_loading = resident_bytes(), []
    pack = packed_tensors.pack

    def watched(*arguments: object) -> object:
        matrix = pack(*arguments)
        while_loading.append(resident_bytes() - start)
        return matrix

    packed_tensors.pack = watched
    base = store.base("tiny")
    packed_tensors.pack = pack
    loaded = resident_bytes() - start
    peak = PeakMemory()
    with peak.measured():
        for _ in range(2):
            step(store)
    used = loaded + peak.num_bytes
    assert isinstance(base.weights, packed_tensors.PackedTensors)
    copy = sum(m.packed.nbytes for n, m in base.weights.packed.matrices.items() if n != "lm_head")
    return Memory(copy, max(while_loading), loaded, used)


def open_store(folder: Path, dtype: torch.dtype) -> ModelStore:
    def load(name: str) -> BaseModel:
        return BaseModel.load(name, folder, None, dtype, torch.device("cpu"))

    return ModelStore(load, VersionCache(folder / "versions", 2**30))


def step(store: ModelStore) -> None:
    """A sample of an adapter, and a training step of it."""
    store.create_model("m", "tiny", LoraSpec(rank=2, seed=0, train_unembed=False))
    version = store.version(store.publish(FromModel("m")))
    engine = SamplingEngine(max_batch=4, kv_cache_bytes=2**20, num_threads=2)
    prompt = np.arange(3, dtype=np.int32)
    engine.submit(version, SampleRequest(prompt, 1, SamplingParams(3, 0)), lambda output: None)
    while engine.busy:
        engine.step()
    tokens = np.arange(24)
    targets = {"target_tokens": tokens + 1, "weights": np.ones(24, np.float32)}
    queue = TrainingQueue(Limits())
    batch = TrainBatch((Datum(tokens.astype(np.int32), targets),), "cross_entropy")
    queue.add(0, store.model("m"), batch)
    (call,) = queue.step(math.inf)
    assert call.error is None
    store.optim_step("m", AdamParams(learning_rate=0.01))


if __name__ == "__main__":
    torch.set_num_threads(2)
    memory = measured(Path(sys.argv[1]), getattr(torch, sys.argv[2]))
    sys.stdout.write(json.dumps(asdict(memory)))
