"""How a request's law of sampling and stopping travels inside SGLang's `custom_params`.

SGLang's own fields round temperature and top-p to 32 bits, end at 2**63 for seeds and know no
sample index; its stops merge what the request and the model say. So the whole law goes beside them.
No torch, no SGLang: both ends import this file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.stops import StopRule
from tinkercloud.errors import UserError

_LAW = "tinkercloud"
_STOP_IDS = "tinkercloud_stop_ids"
_STOP_STRINGS = "tinkercloud_stop_strings"


@dataclass(frozen=True, slots=True)
class Law:
    """What one sample is drawn with, besides the position."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample_index: int


def custom_params(
    params: SamplingParams, sample_index: int, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    """For JSON: scalars, lists and one level of mapping are all that SGLang passes on.

    The seed is text: JSON numbers above 2**63 are not every parser's. Raises UserError.
    """
    if not 0 <= params.seed < 2**64:
        raise UserError(f"a seed lies between 0 and 2**64 - 1, {params.seed} does not")
    law = Law(params.temperature, params.top_k, params.top_p, params.seed, sample_index)
    stop_ids = set(params.stop_token_ids) | (set(eos_ids) if params.use_eos else set())
    return {
        _LAW: asdict(law) | {"seed": str(law.seed)},
        _STOP_IDS: sorted(stop_ids),
        _STOP_STRINGS: list(params.stop_strings),
    }


def law_of(custom: Mapping[str, Any] | None) -> Law | None:
    """The law that `custom_params` wrote, None for a request that is not ours."""
    fields = (custom or {}).get(_LAW)
    return Law(**{**fields, "seed": int(fields["seed"])}) if fields is not None else None


def stop_rule_of(custom: Mapping[str, Any], tokenizer: Any) -> StopRule:
    """tokenizer: a transformers tokenizer or None; its fast core decodes bytes as they are."""
    params = SamplingParams(
        None,
        0,
        stop_token_ids=tuple(custom[_STOP_IDS]),
        stop_strings=tuple(custom[_STOP_STRINGS]),
        use_eos=False,
    )
    return StopRule(params, (), getattr(tokenizer, "backend_tokenizer", tokenizer))
