"""Our server in a process of its own, and the official SDK on it."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.serving import Server, start_server

MODEL = "smollm2"
MAX_BATCH = 128
KV_CACHE_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class Served:
    """A base model and the flags of a server that has it. context: the longest of its prompts."""

    base_model: str
    flags: Sequence[str]
    context: int
    vocabulary: int


@contextmanager
def our_server(*flags: str, parent: Path | None = None) -> Iterator[Server]:
    """With a data directory of its own, in `parent` where that is given."""
    with (
        tempfile.TemporaryDirectory(dir=parent) as folder,
        start_server(*flags, data_dir=Path(folder) / "data") as server,
    ):
        yield server


def default_dtype() -> str:
    """Of the server's weights on this machine."""
    from tinkercloud.embedded.model.device import choose_device, choose_dtype  # imports PyTorch

    return str(choose_dtype("auto", choose_device())).removeprefix("torch.")


def embedded_flags(model: Path, dtype: str) -> tuple[str, ...]:
    """model: GGUF file or Hugging Face folder; it is served as MODEL."""
    return ("--backend", "embedded", "--model", f"{MODEL}={model}", "--dtype", dtype)


def engine_flags(max_batch: int = MAX_BATCH) -> tuple[str, ...]:
    """max_batch: the most samples that are decoded at once."""
    sizes = (str(max_batch), "--engine-kv-cache-bytes", str(KV_CACHE_BYTES))
    return ("--engine-max-batch", *sizes)


def sdk_for(server: Server) -> Any:
    """The module `tinker`: it reads the server's address from the environment."""
    os.environ.update(server.sdk_environment)
    import tinker

    return tinker


def sdk_datum(tinker: Any, tokens: np.ndarray, inputs: Mapping[str, np.ndarray]) -> Any:
    """tokens (T,); inputs: of the loss, each (T,)."""
    tensors = {name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()}
    prompt = tinker.ModelInput.from_ints(tokens.tolist())
    return tinker.Datum(model_input=prompt, loss_fn_inputs=tensors)
