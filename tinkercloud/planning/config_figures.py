"""Checked reading of a Hugging Face config: what is missing or of the wrong kind is refused.

Both spellings are read: transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from tinkercloud.errors import PlanRefused
from tinkercloud.planning.model_shape import Rope

MAX = 2**40  # a damaged file must not make anyone count for ever
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Figures:
    """A config, or a part of it. where: its path in the file, for messages."""

    config: Mapping[str, Any]
    where: str = "config.json"

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; null counts as missing."""
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise PlanRefused((f"{self.where}: {name} is missing",))
        highest = MAX_LAYERS if name == "num_hidden_layers" else MAX
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
            raise PlanRefused(
                (f"{self.where}: {name} is {value!r}, no whole number up to {highest}",)
            )
        return value

    def maybe(self, name: str) -> int | None:
        """A count, or None where there is none (missing, null, 0 or -1)."""
        return None if self.config.get(name) in (None, 0, -1) else self.count(name)

    def real(self, name: str, default: float) -> float:
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise PlanRefused((f"{self.where}: {name} is {value!r}, not a number",))
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanRefused((f"{self.where}: {name} is {value!r}, not true or false",))
        return value

    def text(self, name: str, default: str) -> str:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise PlanRefused((f"{self.where}: {name} is {value!r}, not a text",))
        return value

    def part(self, name: str) -> "Figures | None":
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise PlanRefused((f"{self.where}: {name} is {value!r}, not an object",))
        return Figures(cast(Mapping[str, Any], value), f"{self.where}: {name}")

    def items(self, name: str) -> list[Any] | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            raise PlanRefused((f"{self.where}: {name} is {value!r}, not a list",))
        return cast("list[Any] | None", value)


def read_rope(figures: Figures, *, base: float = 10_000.0, percent: float = 1.0) -> Rope:
    """base, percent: the architecture's own, where the config is silent."""
    scaling = figures.part("rope_parameters") or figures.part("rope_scaling")
    scaling = scaling or Figures({}, figures.where)
    # Gemma 3 has a set for each kind of layer; that of full attention reaches farthest.
    scaling = scaling.part("full_attention") or scaling
    theta = figures.real("rope_theta", base)
    share = figures.real("partial_rotary_factor", percent)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    original = figures.maybe("original_max_position_embeddings")
    return Rope(
        base=scaling.real("rope_theta", theta),
        kind=kind,
        percent=scaling.real("partial_rotary_factor", share),
        factor=scaling.real("factor", 1.0),
        low_freq_factor=scaling.real("low_freq_factor", 1.0),
        high_freq_factor=scaling.real("high_freq_factor", 4.0),
        original_max_position_embeddings=scaling.count(
            "original_max_position_embeddings",
            original or figures.count("max_position_embeddings", 4096),
        ),
        beta_fast=scaling.real("beta_fast", 32.0),
        beta_slow=scaling.real("beta_slow", 1.0),
        mscale=scaling.real("mscale", 1.0),
        mscale_all_dim=scaling.real("mscale_all_dim", 0.0),
    )


def read_window(figures: Figures, layers: int, *, switch: str | None = None) -> int | None:
    """The sliding window that some layer really uses.

    switch: the flag that turns it on (Qwen); layers from max_window_layers on have it then.
    """
    window = figures.maybe("sliding_window")
    if window is None or (switch is not None and not figures.flag(switch)):
        return None
    kinds = figures.items("layer_types")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if switch is not None and (figures.maybe("max_window_layers") or 0) >= layers:
        return None
    return window


def read_quantization(figures: Figures) -> str | None:
    part = figures.part("quantization_config")
    return None if part is None else part.text("quant_method", "unknown")
