"""How a request's sampling parameters travel inside SGLang's `custom_params`.

SGLang's own fields round temperature and top-p to 32 bits, end at 2**63 for seeds and know no
sample index; its stops merge those of the request and of the model. So ours travel beside them.
No torch, no SGLang: both ends import this file.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from tinkercloud.core.types import Grammar, SamplingParams
from tinkercloud.decoding.stops import StopRule
from tinkercloud.errors import UserError
from tinkercloud.grammar.schema_limits import checked_source, choices_expression

_SAMPLING = "tinkercloud"
_STOP_IDS = "tinkercloud_stop_ids"
_STOP_STRINGS = "tinkercloud_stop_strings"
_COMMITTED = "tinkercloud_committed"


@dataclass(frozen=True, slots=True)
class SampleParams:
    """One sample of a request, besides its prompt."""

    params: SamplingParams
    sample_index: int
    committed: tuple[int, ...] = ()  # the tokens that it begins with, from `first_position` on
    first_position: int = 0


def custom_params(
    params: SamplingParams, sample_index: int, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    """For JSON: scalars, lists and one level of mapping are all that SGLang passes on.

    The seed is text: not every JSON parser reads integers above 2**63. Raises UserError.
    """
    if not 0 <= params.seed < 2**64:
        raise UserError(f"a seed lies between 0 and 2**64 - 1, {params.seed} does not")
    stop_ids = set(params.stop_token_ids) | (set(eos_ids) if params.use_eos else set())
    return {
        _SAMPLING: {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "seed": str(params.seed),
            "sample_index": sample_index,
        },
        _STOP_IDS: sorted(stop_ids),
        _STOP_STRINGS: list(params.stop_strings),
    }


def sample_params_of(custom: Mapping[str, Any] | None) -> SampleParams | None:
    """What `custom_params` wrote, end-of-sequence tokens among the stop tokens; None for a request
    that is not ours."""
    fields = (custom or {}).get(_SAMPLING)
    if custom is None or fields is None:
        return None
    params = SamplingParams(
        max_tokens=None,
        seed=int(fields["seed"]),
        temperature=fields["temperature"],
        top_k=fields["top_k"],
        top_p=fields["top_p"],
        min_p=fields["min_p"],
        presence_penalty=fields["presence_penalty"],
        frequency_penalty=fields["frequency_penalty"],
        stop_strings=tuple(custom[_STOP_STRINGS]),
        stop_token_ids=tuple(custom[_STOP_IDS]),
        use_eos=False,
    )
    first_position, *committed = custom.get(_COMMITTED) or [0]
    return SampleParams(params, fields["sample_index"], tuple(committed), first_position)


def commit(custom: dict[str, Any], prompt: Sized, tokens: Sequence[int]) -> None:
    """Order a sample of this prompt to begin with these tokens."""
    custom[_COMMITTED] = [len(prompt), *tokens]


def grammar_params(grammar: Grammar | None) -> dict[str, str]:
    """SGLang's own parameters, whose backend masks the logits before our sampler sees them. Raises
    UserError."""
    if grammar is None:
        return {}
    source = checked_source(grammar)
    if grammar.kind == "json_schema":
        return {"json_schema": grammar.text}
    return {"regex": grammar.text if grammar.kind == "regex" else choices_expression(source)}


def stop_rule_of(sample: SampleParams, tokenizer: Any) -> StopRule:
    """tokenizer: a transformers tokenizer or None; its fast core decodes bytes as they are."""
    return StopRule(sample.params, (), getattr(tokenizer, "backend_tokenizer", tokenizer))
