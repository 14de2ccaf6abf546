"""Architectures by Hugging Face class name. This table needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from tinkercloud.errors import ConfigError

if TYPE_CHECKING:
    from tinkercloud.architectures.llama import Llama

_DECODER = "tinkercloud.architectures.llama:Llama"

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": _DECODER,
    "MistralForCausalLM": _DECODER,
    "MinistralForCausalLM": _DECODER,
    "Qwen2ForCausalLM": _DECODER,
    "Qwen3ForCausalLM": _DECODER,
    "Gemma2ForCausalLM": _DECODER,
    "Gemma3ForCausalLM": _DECODER,
    "Olmo2ForCausalLM": _DECODER,
    "GraniteForCausalLM": _DECODER,
    "Ernie4_5ForCausalLM": _DECODER,
    "HeliumForCausalLM": _DECODER,
}


def load_architecture(name: str) -> "type[Llama]":
    """The class that computes the architecture `name`. Raises ConfigError for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    module, _, attribute = ARCHITECTURES[name].partition(":")
    return getattr(import_module(module), attribute)
