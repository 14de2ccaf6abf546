"""How a request's sampling parameters and stops travel inside SGLang's `custom_params`.

SGLang's own fields would change them: temperature and top-p are rounded to 32 bits, seeds end at
2**63, there is no sample index, and its stops merge the request's with the model's. So all travel
beside them. No torch, no SGLang: both ends import this file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.stops import StopRule
from tinkercloud.errors import UserError

_DRAW = "tinkercloud"
_STOP_IDS = "tinkercloud_stop_ids"
_STOP_STRINGS = "tinkercloud_stop_strings"


@dataclass(frozen=True, slots=True)
class DrawParams:
    """What a sample's tokens are drawn with, besides their positions."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample_index: int


def custom_params(
    params: SamplingParams, sample_index: int, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    """For JSON: scalars, lists and one level of mapping are all that SGLang passes on.

    The seed is text: not every JSON parser reads integers above 2**63. Raises UserError.
    """
    if not 0 <= params.seed < 2**64:
        raise UserError(f"a seed lies between 0 and 2**64 - 1, {params.seed} does not")
    draw = DrawParams(params.temperature, params.top_k, params.top_p, params.seed, sample_index)
    stop_ids = set(params.stop_token_ids) | (set(eos_ids) if params.use_eos else set())
    return {
        _DRAW: asdict(draw) | {"seed": str(draw.seed)},
        _STOP_IDS: sorted(stop_ids),
        _STOP_STRINGS: list(params.stop_strings),
    }


def draw_params_of(custom: Mapping[str, Any] | None) -> DrawParams | None:
    """What `custom_params` wrote; None for a request that is not ours."""
    fields = (custom or {}).get(_DRAW)
    return DrawParams(**{**fields, "seed": int(fields["seed"])}) if fields is not None else None


def stop_rule_of(custom: Mapping[str, Any], tokenizer: Any) -> StopRule:
    """tokenizer: a transformers tokenizer, of which the fast core is used, or None."""
    params = SamplingParams(
        None,
        0,
        stop_token_ids=tuple(custom[_STOP_IDS]),
        stop_strings=tuple(custom[_STOP_STRINGS]),
        use_eos=False,
    )
    return StopRule(params, (), getattr(tokenizer, "backend_tokenizer", tokenizer))
