"""The base models that an engine serves, and the store that loads their weights."""

import logging

from tinkercloud.core.types import ServedModel
from tinkercloud.embedded.forward.row_invariance import log_row_invariance
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import (
    choose_device,
    choose_dtype,
    set_up_torch,
    usable_cores,
)
from tinkercloud.embedded.model.memory import free_bytes
from tinkercloud.embedded.native.train_bindings import has_compiled_pass
from tinkercloud.embedded.process.memory_budget import MemoryBudget
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.protocol import EngineSettings
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.errors import ConfigError
from tinkercloud.weights.adapters import adapter_sizes
from tinkercloud.weights.huggingface import hf_config_of
from tinkercloud.weights.loader import check_tensors, read_config
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

logger = logging.getLogger(__name__)


def open_models(settings: EngineSettings) -> tuple[tuple[ServedModel, ...], ModelStore]:
    """Read every model's configuration and tokenizer, and the headers of the default model's files;
    the store loads weights at their first use.

    Raises ConfigError or OSError for a model that cannot be served."""
    device = choose_device()
    dtype = choose_dtype(settings.dtype, device)
    set_up_torch(settings.engine.threads or usable_cores())
    check_tensors(settings.models[0].path)
    served, folders = [], {}
    for model in settings.models:
        config = read_config(model.path)
        tokenizer = ensure_tokenizer_folder(model.path, settings.cache_dir)
        served.append(
            ServedModel(
                model.name, config.model_type, config.max_position_embeddings, config.vocab_size,
                config.num_parameters, tokenizer, config.eos_token_ids,
                str(dtype).removeprefix("torch."), hf_config_of(model.path, config),
                adapter_sizes(config.linear_shapes()),
            )
        )  # fmt: skip
        folders[model.name] = (model.path, tokenizer)

    def load(name: str) -> BaseModel:
        path, tokenizer = folders[name]
        return BaseModel.load(name, path, tokenizer, dtype, device)

    memory_bytes = settings.engine.version_cache_bytes
    versions = VersionCache(settings.cache_dir / "versions", memory_bytes)
    budget = MemoryBudget(lambda: free_bytes(device, settings.engine.memory_bytes))
    return tuple(served), ModelStore(load, versions, budget)


def load_default(name: str, models: ModelStore) -> None:
    """Raises ConfigError or OSError where the weights cannot be loaded."""
    try:
        base = models.base(name)
    except (MemoryError, RuntimeError) as error:  # PyTorch has no class of its own for the former
        logger.exception("the weights of %s cannot be loaded", name)
        reason = str(error).partition("\n")[0] or "out of memory"
        raise ConfigError(f"the weights of {name} cannot be loaded: {reason}") from error
    if base.device.type == "cpu" and not has_compiled_pass(base.device, base.dtype):
        log_row_invariance(base.dtype)
