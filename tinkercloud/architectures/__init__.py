"""Architectures by Hugging Face class name. This table needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from tinkercloud.errors import ConfigError

if TYPE_CHECKING:
    from tinkercloud.architectures.llama import Llama

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "tinkercloud.architectures.llama:Llama",
    "Qwen2ForCausalLM": "tinkercloud.architectures.qwen2:Qwen2",
    "Qwen3ForCausalLM": "tinkercloud.architectures.qwen3:Qwen3",
}


def load_architecture(name: str) -> "type[Llama]":
    """The class that computes the architecture `name`. Raises ConfigError for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    module, _, attribute = ARCHITECTURES[name].partition(":")
    return getattr(import_module(module), attribute)
