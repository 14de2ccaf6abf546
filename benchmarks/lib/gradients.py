"""How far LoRA gradients in bfloat16 are from float32 ones on the weights that were not rounded:
ours, and PEFT's, whose base weights are bfloat16 or who multiplies by autocast.

All have the same adapter, in float32, and the same tokens; all tokens are trained on. Distances are
relative, over all tensors together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.accuracy import relative_distance
from benchmarks.lib.smollm2 import document_tokens
from benchmarks.peers.training_start import Start, prepare
from tinkercloud.core.types import Datum, TrainBatch
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import train_alone
from tinkercloud.weights.adapters import load_adapter

Gradients = dict[str, Tensor]
Batch = Sequence[Sequence[int]]

LENGTH, NUM_TEXTS = 128, 4
MICROBATCH_TOKENS = 1024


@dataclass(frozen=True)
class Distances:
    """From PEFT in float32, relative."""

    ours: float
    pure: float
    autocast: float


def batches(folder: Path) -> dict[str, Batch]:
    """Of random tokens and of natural text."""
    ids = document_tokens(folder)
    random = np.random.default_rng(0).integers(0, max(ids), (NUM_TEXTS, LENGTH + 1))
    starts = range(0, len(ids) - LENGTH - 1, len(ids) // (NUM_TEXTS + 1))
    natural = [ids[start : start + LENGTH + 1] for start in starts][:NUM_TEXTS]
    return {"random": random.tolist(), "natural": natural}


def distances(root: Path, model: Path) -> dict[str, Distances]:
    """By the kind of text. model: a Hugging Face folder with float32 weights. root: for files."""
    start = prepare(root, model, unembedding=True)
    texts = batches(model)
    narrow = torch.autocast("cpu", torch.bfloat16)
    exact = _by_text(texts, lambda: peft_gradients(start, torch.float32, nullcontext()))
    ways: dict[str, Callable[[], AbstractContextManager[Callable[[Batch], Gradients]]]] = {
        "ours": lambda: our_gradients(start, torch.bfloat16, root),
        "pure": lambda: peft_gradients(start, torch.bfloat16, nullcontext()),
        "autocast": lambda: peft_gradients(start, torch.float32, narrow),
    }
    measured = {name: _by_text(texts, way) for name, way in ways.items()}
    return {
        kind: Distances(
            **{name: relative_distance(by[kind], exact[kind]) for name, by in measured.items()}
        )
        for kind in texts
    }


def _by_text(
    texts: dict[str, Batch],
    way: Callable[[], AbstractContextManager[Callable[[Batch], Gradients]]],
) -> dict[str, Gradients]:
    with way() as gradients:
        return {kind: gradients(batch) for kind, batch in texts.items()}


@contextmanager
def peft_gradients(
    start: Start, dtype: torch.dtype, arithmetic: AbstractContextManager[object]
) -> Iterator[Callable[[Batch], Gradients]]:
    """dtype: of the base weights. One sequence at a time, so that nothing is padded."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(start.model, dtype=dtype)
    model = PeftModel.from_pretrained(base, start.adapter, is_trainable=True)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data = weight.data.float()

    def gradients(batch: Batch) -> Gradients:
        model.zero_grad()
        for ids in batch:
            tokens = torch.tensor([ids])
            with arithmetic:
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
            torch.nn.functional.cross_entropy(
                logits.float(), tokens[0, 1:], reduction="sum"
            ).backward()
        return {
            name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad.float()
            for name, p in model.named_parameters()
            if p.requires_grad and p.grad is not None
        }

    yield gradients


@contextmanager
def our_gradients(
    start: Start, dtype: torch.dtype, root: Path
) -> Iterator[Callable[[Batch], Gradients]]:
    device = torch.device("cpu")

    def load(name: str) -> BaseModel:
        return BaseModel.load(name, start.model, None, dtype, device)

    store = ModelStore(load, VersionCache(root / "versions", 2**30))
    store.create_model("m", "base", start.spec)
    model = store.model("m")
    assert model.adapter is not None
    adapter = load_adapter(start.adapter, start.spec, start.config.linear_shapes(), device)
    with torch.no_grad():
        for name, (a, b) in adapter.items():
            model.adapter[name][0].copy_(a)
            model.adapter[name][1].copy_(b)

    def gradients(batch: Batch) -> Gradients:
        model.grads = {}
        data = tuple(map(datum, batch))
        train_alone(model, TrainBatch(data, "cross_entropy"), Limits(MICROBATCH_TOKENS))
        return {name: gradient.clone() for name, gradient in model.grads.items()}

    yield gradients


def datum(ids: Sequence[int]) -> Datum:
    """Every token is trained on."""
    tokens = np.array(ids)
    inputs = {
        "target_tokens": tokens[1:].astype(np.int64),
        "weights": np.ones(len(ids) - 1, np.float32),
    }
    return Datum(tokens[:-1].astype(np.int32), inputs)
