"""What counts as on-policy, and how far the trainer is from the sampler there."""

from dataclasses import replace

import numpy as np
import pytest

from tinkercloud.core.on_policy import OnPolicyTracker
from tinkercloud.core.types import (
    Datum,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TrainBatch,
    TrainOutput,
)

PROMPT = np.array([5, 6, 7], np.int32)
TOKENS = np.array([8, 9], np.int32)
LOGPROBS = np.array([-0.5, -1.25], np.float32)
REQUEST = SampleRequest(PROMPT, 1, SamplingParams(2, 0))
OUTPUT = SampleOutput((SampledSequence(TOKENS, LOGPROBS, "length"),))


@pytest.fixture
def tracker() -> OnPolicyTracker:
    """Version "v" has the weights of the model "m" and has drawn OUTPUT."""
    tracker = OnPolicyTracker()
    tracker.published("m", "v")
    tracker.drawn("v", REQUEST, OUTPUT)
    return tracker


def datum(**inputs: np.ndarray) -> Datum:
    zeros = np.zeros(len(PROMPT) - 1, np.float32)
    sampled = {
        "target_tokens": np.array([0, 0, *TOKENS], np.int64),
        "logprobs": np.concatenate([zeros, LOGPROBS]),
        "advantages": np.concatenate([zeros, np.ones(2, np.float32)]),
    }
    return Datum(np.array([*PROMPT, TOKENS[0]], np.int32), sampled | inputs)


def trained(
    tracker: OnPolicyTracker, *data: Datum, offset: float = 0.0, model_id: str = "m"
) -> dict[str, float]:
    """The metrics of a step whose trainer is `offset` nats above the sampler at the last token."""
    logprobs = np.array([-9.0, -9.0, *LOGPROBS], np.float32)
    logprobs[-1] += offset
    outputs = tuple({"logprobs": logprobs} for _ in data)
    tracker.trained(model_id, TrainBatch(data, "importance_sampling"), TrainOutput(outputs, {}))
    return tracker.stepped(model_id)


def test_the_largest_ratio_of_tokens_that_the_present_weights_drew(
    tracker: OnPolicyTracker,
) -> None:
    metrics = trained(tracker, datum(), datum(), offset=-0.25)
    assert metrics == {
        "on_policy_ratio_deviation:max": pytest.approx(1 - np.exp(-0.25)),
        "on_policy_tokens:sum": 4,
    }
    assert tracker.stats() == {
        "on_policy_tokens": 4,
        "on_policy_ratio_deviation_max": pytest.approx(1 - np.exp(-0.25)),
        "on_policy_logprob_deviation_mean": pytest.approx(0.125),
    }


def test_equal_log_probabilities_are_a_deviation_of_nothing(tracker: OnPolicyTracker) -> None:
    assert trained(tracker, datum()) == {
        "on_policy_ratio_deviation:max": 0,
        "on_policy_tokens:sum": 2,
    }


@pytest.mark.parametrize(
    "other",
    [
        Datum(np.array([5, 6, 4, 8], np.int32), datum().inputs),
        datum(target_tokens=np.array([0, 0, 8, 8])),
        datum(logprobs=np.array([0, 0, -0.5, -1.0], np.float32)),
        datum(advantages=np.zeros(4, np.float32)),
        datum(advantages=np.array([0, 0, 1, 0], np.float32)),
    ],
    ids=["prompt", "tokens", "logprobs", "untrained", "cut"],
)
def test_other_datums_say_nothing(tracker: OnPolicyTracker, other: Datum) -> None:
    assert trained(tracker, other, offset=1.0) == {}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
    ],
    ids=str,
)
def test_changed_distributions_are_left_out(params: dict[str, float]) -> None:
    tracker = OnPolicyTracker()
    tracker.published("m", "v")
    request = replace(REQUEST, params=replace(REQUEST.params, **params))
    tracker.drawn("v", request, OUTPUT)
    assert trained(tracker, datum()) == {}


def test_samples_of_older_weights_and_of_other_models_say_nothing(
    tracker: OnPolicyTracker,
) -> None:
    assert trained(tracker, datum(), model_id="other") == {}
    assert trained(tracker, datum()) != {}
    assert trained(tracker, datum()) == {}  # the step has changed the weights
    tracker.drawn("v", REQUEST, OUTPUT)  # of the version before the step
    assert trained(tracker, datum()) == {}


def test_a_checkpoint_of_the_present_weights_is_on_policy() -> None:
    tracker = OnPolicyTracker()
    tracker.published("m", "folder")
    tracker.loaded("folder", "v")
    tracker.loaded("another folder", "w")
    tracker.drawn("w", REQUEST, OUTPUT)
    assert trained(tracker, datum()) == {}
    tracker.published("m", "folder")
    tracker.loaded("folder", "v")
    tracker.drawn("v", REQUEST, OUTPUT)
    assert trained(tracker, datum())["on_policy_tokens:sum"] == 2


def test_sampled_tokens_are_those_of_the_mask_where_there_is_one(tracker: OnPolicyTracker) -> None:
    """stable_reinforce: a token without an advantage is one of the sample all the same."""
    masked = datum(
        advantages=np.array([0, 0, 1, 0], np.float32),
        sampled_mask=np.array([0, 0, 1, 1], np.float32),
    )
    assert trained(tracker, masked)["on_policy_tokens:sum"] == 2


def test_a_model_that_loads_other_weights_has_nothing_on_policy(tracker: OnPolicyTracker) -> None:
    tracker.changed("m")
    assert trained(tracker, datum()) == {}
