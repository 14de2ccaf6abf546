"""What an adapter_config.json of PEFT says, as far as it changes what an adapter computes.

Field names and meanings: https://huggingface.co/docs/peft/package_reference/lora (LoraConfig).
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud.errors import UserError
from tinkercloud.weights.adapters import ADAPTER_CONFIG_FILE

MAX_CONFIG_BYTES = 1024 * 1024
MAX_RANK = 1024
MAX_PATTERNS = 10_000

# What does not change what a saved adapter computes, or what its tensors show by themselves.
_HARMLESS = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save",
        "peft_version", "qalora_group_size", "revision", "target_modules",
    )
)  # fmt: skip
_READ = frozenset(
    ("alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
     "task_type", "use_rslora")
)  # fmt: skip
# Ways to begin that leave the base weights as they are; the others put a part of them into the
# adapter, which is then one of other base weights (PEFT can convert those when it saves).
_INITS = (True, False, "gaussian", "eva", "orthogonal")
_REFUSED = {
    "use_dora": "DoRA scales the rows of the whole weight, which no A and B can",
    "alora_invocation_tokens": "an activated LoRA begins at a token of each prompt",
    "ensure_weight_tying": "it would change the embeddings too",
    "fan_in_fan_out": "its matrices are transposed",
    "layer_replication": "it makes another network of the base",
    "lora_bias": "B has a bias",
    "target_parameters": "it adapts parameters that are no linear modules",
    "trainable_token_indices": "it changes embeddings",
    "use_qalora": "A is grouped (QALoRA)",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """rank and alpha of all modules but those that a pattern names. rank_stabilized: the product
    of A and B is scaled by alpha / sqrt(rank) (Kalajdzievski 2023), not alpha / rank."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        return _by_pattern(self.alpha_pattern, module, self.alpha)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rank_stabilized else rank)


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """As PEFT matches: the first key that is the end of the name, from a dot on."""
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def read_peft_config(directory: Path) -> PeftConfig:
    """Raises UserError that names everything which cannot be represented here, with reasons."""
    path = directory / ADAPTER_CONFIG_FILE
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no JSON object")
    faults = _faults(raw)
    if faults:
        raise UserError(f"this adapter cannot be imported exactly: {'; '.join(faults)}")
    return PeftConfig(
        rank=raw["r"],
        alpha=float(raw.get("lora_alpha", 8)),  # PEFT's default
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
        rank_stabilized=bool(raw.get("use_rslora")),
    )


def _faults(raw: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    if raw.get("peft_type") != "LORA":
        faults.append(f"peft_type is {raw.get('peft_type')!r}; only LORA is A and B")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        faults.append(f"task_type is {raw['task_type']!r}, not CAUSAL_LM")
    if raw.get("init_lora_weights", True) not in _INITS:
        faults.append(
            f"init_lora_weights {raw['init_lora_weights']!r} changes the base weights; save it "
            "with path_initial_model_for_weight_conversion"
        )
    if not _is_rank(raw.get("r")):
        faults.append(f"r is {raw.get('r')!r}; it must lie in 1..{MAX_RANK}")
    if not _is_number(raw.get("lora_alpha", 8)):
        faults.append(f"lora_alpha is {raw['lora_alpha']!r}, no finite number")
    faults += _pattern_faults("rank_pattern", raw.get("rank_pattern"), _is_rank)
    faults += _pattern_faults("alpha_pattern", raw.get("alpha_pattern"), _is_number)
    for name, value in raw.items():
        if value and name not in _HARMLESS | _READ:
            faults.append(f"{name}: {_REFUSED.get(name, 'its meaning is not known here')}")
    return faults


def _pattern_faults(name: str, pattern: Any, is_value: Callable[[Any], bool]) -> list[str]:
    if not pattern:
        return []
    if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERNS:
        return [f"{name} is no object of up to {MAX_PATTERNS} modules"]
    faults = [f"{name}[{key!r}] is {v!r}" for key, v in pattern.items() if not is_value(v)]
    for key in pattern:
        try:
            re.compile(key)
        except re.error:
            faults.append(f"{name} has the key {key!r}, no regular expression")
    return faults


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
