"""What a request means once it is checked."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from tests.api.harness import wire_datum
from tinker_gmi.types import AdamParams as JsonAdamParams
from tinker_gmi.types import SampleRequest
from tinker_gmi.types import SamplingParams as JsonSamplingParams
from tinkercloud.backends.fake import TINY
from tinkercloud.core.data_converter import DataConverter
from tinkercloud.core.raw_batch import RawBatch
from tinkercloud.core.types import AdamParams, SamplingParams
from tinkercloud.errors import InvalidRequest
from tinkercloud.losses import LOSSES
from tinkercloud.wire.codec import WireDatum

CONVERTER = DataConverter(TINY)


def sampling(**params: Any):
    body = {"prompt": {"chunks": [{"tokens": [1]}, {"tokens": [2, 3]}]}, "sampling_params": params}
    return CONVERTER.sample_request(SampleRequest.model_validate(body))


def test_chunks_are_joined() -> None:
    assert sampling().prompt.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("stop", "strings", "ids", "use_eos"),
    [
        (None, (), (), True),
        ([], (), (), False),
        ("ab", ("ab",), (), True),
        (["a", "b"], ("a", "b"), (), True),
        ([7, 8], (), (7, 8), True),
    ],
)
def test_stop_in_all_of_its_forms(stop: Any, strings: Any, ids: Any, use_eos: bool) -> None:
    params = sampling(stop=stop).params
    assert (params.stop_strings, params.stop_token_ids, params.use_eos) == (strings, ids, use_eos)


@pytest.mark.parametrize(("seed", "folded"), [(5, 5), (-1, 2**64 - 1), (2**64 + 3, 3)])
def test_seeds_are_folded_to_64_bits(seed: int, folded: int) -> None:
    assert sampling(seed=seed).params.seed == folded


def test_an_absent_seed_is_drawn_anew_each_time() -> None:
    assert len({sampling().params.seed for _ in range(20)}) == 20


def test_zero_values_are_kept() -> None:
    params = sampling(temperature=0.0, seed=0, max_tokens=1).params
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, 0, 1)


def test_a_temperature_too_small_to_compute_with_is_greedy() -> None:
    assert sampling(temperature=1e-300).params.temperature == 0.0


def test_a_top_k_as_large_as_the_vocabulary_is_no_limit() -> None:
    assert sampling(top_k=TINY.vocab_size).params.top_k == -1


def test_the_loss_configuration_is_completed_with_defaults() -> None:
    numbers = np.zeros(4, np.float32)
    datum = WireDatum(
        wire_datum().chunks,
        {
            "target_tokens": np.array([1, 2, 3, 4]),
            "logprobs": numbers,
            "advantages": np.array([1, 0, -1, 2]),  # integers become floats
        },
    )
    batch = CONVERTER.train_batch(RawBatch([datum], "ppo", {"clip_high_threshold": 1.5}))
    assert batch.loss_fn_config == {**LOSSES["ppo"].defaults, "clip_high_threshold": 1.5}
    [converted] = batch.data
    assert converted.tokens.dtype == np.int32
    assert converted.inputs["target_tokens"].dtype == np.int64
    assert converted.inputs["advantages"].dtype == np.float32
    assert converted.inputs["advantages"].tolist() == [1, 0, -1, 2]


def test_cross_entropy_without_weights_counts_every_token_once() -> None:
    wide = np.array([[1, 2], [2, 3], [3, 4], [4, 5]])
    data = [wire_datum(weights=0), wire_datum(weights=0, target_tokens=wide)]
    one, many = CONVERTER.train_batch(RawBatch(data, "cross_entropy", {})).data
    assert one.inputs["weights"].tolist() == [1.0] * 4
    assert one.inputs["weights"].dtype == np.float32
    assert many.inputs["weights"].tolist() == [[1.0, 1.0]] * 4


UNRECORDED = [name for name, spec in LOSSES.items() if not spec.needs_provenance]


@pytest.mark.parametrize("loss_fn", sorted({*UNRECORDED} - {"cross_entropy"}))
def test_weights_scale_the_advantages_of_the_other_losses(loss_fn: str) -> None:
    arrays: dict[str, Any] = {name: np.full(4, 0.5) for name in LOSSES[loss_fn].inputs}
    arrays["advantages"] = np.array([1.0, -2.0, 3.0, 4.0])
    datum = wire_datum(weights=[0.0, 1.0, 0.5, 2.0], **arrays)
    [converted] = CONVERTER.train_batch(RawBatch([datum], loss_fn, {})).data
    assert converted.inputs["advantages"].tolist() == [0.0, -2.0, 1.5, 8.0]
    assert converted.inputs["advantages"].dtype == np.float32
    assert "weights" not in converted.inputs


def test_negative_and_fractional_weights_are_kept() -> None:
    weights = [-1.5, 0.25, 0.0, 3.0]
    raw = RawBatch([wire_datum(weights=weights)], "cross_entropy", {})
    assert CONVERTER.train_batch(raw).data[0].inputs["weights"].tolist() == weights


def test_thresholds_in_the_wrong_order_are_refused() -> None:
    config = {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0}
    with pytest.raises(InvalidRequest, match="above"):
        CONVERTER.train_batch(RawBatch([wire_datum()], "ppo", config))


def test_adam_parameters_have_the_same_names_and_defaults_on_the_wire_and_inside() -> None:
    assert JsonAdamParams().model_dump() == asdict(AdamParams())


def test_sampling_parameters_have_the_same_defaults_on_the_wire_and_inside() -> None:
    wire, inside = JsonSamplingParams(), SamplingParams(max_tokens=None, seed=0)
    for name in ("max_tokens", "temperature", "top_k", "top_p"):
        assert getattr(wire, name) == getattr(inside, name)
