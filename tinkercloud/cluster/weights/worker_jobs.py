"""Reading and converting weight files in worker processes of Ray: the API process has no torch."""

import shutil
from pathlib import Path
from typing import Any

from tinkercloud.cluster.gpus.actor_deaths import cause_of_death
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.errors import ConfigError, EngineDied, TinkercloudError, UserError
from tinkercloud.weights.json_file import read_json

FULL_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


async def run(link: RayLink, function: Any, *args: Any) -> Any:
    """Call a function in a worker. Raises what it raised, if it is one of our errors
    (Ray wraps them), EngineDied where the worker ended."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        link.check()
        task = ray.remote(function).options(num_cpus=0, max_retries=0)
        return await link.answer(task.remote(*args))
    except RayTaskError as error:
        if isinstance(error.cause, TinkercloudError):
            raise error.cause from None
        raise
    except RayError as error:
        raise EngineDied(f"a process that read weights died: {cause_of_death(error)}") from error


def hf_folder(path: Path, cache_dir: Path, dtype: str) -> Path:
    """A Hugging Face folder of a base model, unpacked from GGUF where it is one.

    Raises ConfigError.
    """
    import torch

    from tinkercloud.weights.huggingface import ensure_hf_folder

    if not path.exists():
        raise ConfigError(f"no model at {path}")
    return ensure_hf_folder(path, cache_dir, getattr(torch, dtype))


def full_model_folder(base: Path, checkpoint: Path, target: Path) -> None:
    """A full-parameter checkpoint as a Hugging Face folder for engines, in the base's dtypes.

    Holds one file of the base in memory at a time. Raises UserError for a checkpoint of another
    base model.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    tied = read_json(base / "config.json").get("tie_word_embeddings", False)
    try:
        with safe_open(checkpoint / FULL_FILE, "pt") as trained:
            names = frozenset(trained.keys())
            for path in sorted(base.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    tensors = {
                        name: _trained(trained, names, name, file.get_tensor(name), tied=tied)
                        for name in file.keys()  # noqa: SIM118 - not a dict
                    }
                save_file(tensors, target / path.name, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint cannot be read: {error}") from None
    for path in base.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model"):
            shutil.copy(path, target / path.name)


def _trained(trained: Any, names: frozenset[str], name: str, base: Any, *, tied: bool) -> Any:
    """Our checkpoints name weights by their module, without ".weight"."""
    ours = name.removesuffix(".weight")
    if tied and ours == "lm_head":
        ours = "model.embed_tokens"
    if ours not in names:
        return base  # buffers are not trained
    tensor = trained.get_tensor(ours)
    if tensor.shape != base.shape:
        raise UserError(f"the checkpoint's {ours} is not this base model's")
    return tensor.to(base.dtype).contiguous()


def token_ids(raw: object) -> tuple[int, ...]:
    """The `eos_token_id` of Hugging Face files: null, one id or a list of ids."""
    ids = raw if isinstance(raw, list) else [raw]
    return tuple(id for id in ids if isinstance(id, int) and not isinstance(id, bool))
