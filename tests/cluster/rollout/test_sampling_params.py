"""Sampling parameters on their way through SGLang's `custom_params`."""

import json

import pytest

from tinkercloud.cluster.rollout.sampling_params import (
    SampleParams,
    custom_params,
    sample_params_of,
    stop_rule_of,
)
from tinkercloud.core.types import SamplingParams
from tinkercloud.errors import UserError

PARAMS = SamplingParams(
    max_tokens=None,
    seed=2**64 - 1,
    temperature=0.1,
    top_k=7,
    top_p=1 / 3,
    stop_strings=("a\nb", "\u00e9"),
    stop_token_ids=(5, 9),
    use_eos=False,
)


def test_every_parameter_comes_out_of_json_as_it_went_in() -> None:
    custom = json.loads(json.dumps(custom_params(PARAMS, 3, eos_ids=(2,))))
    assert sample_params_of(custom) == SampleParams(PARAMS, 3)


def test_end_of_sequence_tokens_are_among_the_stop_tokens_where_they_count() -> None:
    params = SamplingParams(None, 0, stop_token_ids=(9,))
    sample = sample_params_of(custom_params(params, 0, eos_ids=(2, 9)))
    assert sample is not None and sample.params.stop_token_ids == (2, 9)
    rule = stop_rule_of(sample, None)
    assert [rule.ends([token]) for token in (2, 9, 5)] == [True, True, False]


def test_a_request_without_our_parameters_has_none() -> None:
    assert sample_params_of(None) is None
    assert sample_params_of({"thinking_budget": 3}) is None


def test_a_seed_beyond_64_bits_is_refused() -> None:
    with pytest.raises(UserError, match="seed"):
        custom_params(SamplingParams(None, 2**64), 0, ())
