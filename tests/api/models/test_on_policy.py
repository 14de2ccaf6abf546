"""The deviation of trainer and sampler on-policy, as the official SDK and `/metrics` show it.

The fake backend's trainer and sampler differ by the rounding of float32 at most.
"""

from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from tests import serving
from tests.api.provenance_data import single_turn

PROMPT = [1, 2, 3]
DEVIATION, TOKENS = "on_policy_ratio_deviation:max", "on_policy_tokens:sum"
ADAM = types.AdamParams(learning_rate=0.1)


@pytest.fixture
def model(sdk_server: serving.Server) -> Iterator[tinker.TrainingClient]:
    service = tinker.ServiceClient()
    yield service.create_lora_training_client("fake/tiny", rank=8, seed=1).result()
    service.close("success").result()


def data_of(sampler: tinker.SamplingClient, **params: float) -> list[types.Datum]:
    prompt = types.ModelInput.from_ints(PROMPT)
    sampling = types.SamplingParams(**{"max_tokens": 6, "temperature": 1.0, "seed": 5} | params)
    drawn = sampler.sample(prompt, 4, sampling).result().sequences
    return [single_turn(PROMPT, sequence, 1.0) for sequence in drawn]


def num_tokens(data: list[types.Datum]) -> int:
    return sum(int((d.loss_fn_inputs["advantages"].to_numpy() != 0).sum()) for d in data)


def step(
    model: tinker.TrainingClient, data: list[types.Datum], loss: str = "importance_sampling"
) -> dict[str, float]:
    training = model.forward_backward(data, loss)
    stepping = model.optim_step(ADAM)
    training.result()
    return stepping.result().metrics


@pytest.mark.parametrize("loss", ["importance_sampling", "stable_reinforce"])
def test_a_step_on_samples_of_the_weights_themselves(
    model: tinker.TrainingClient, loss: str
) -> None:
    for _ in range(2):
        sampler = model.save_weights_and_get_sampling_client(record_stability_info=True).result()
        data = data_of(sampler)
        metrics = step(model, data, loss)
        assert 0 <= metrics[DEVIATION] < 1e-6
        assert metrics[TOKENS] == num_tokens(data)


def test_weights_that_were_saved_under_a_name(model: tinker.TrainingClient) -> None:
    path = model.save_weights_for_sampler("now").result().path
    sampler = model.create_sampling_client(path).result()
    data = data_of(sampler)
    assert step(model, data)[TOKENS] == num_tokens(data)
    assert DEVIATION not in step(model, data_of(sampler))


def test_nothing_is_reported_off_policy(model: tinker.TrainingClient) -> None:
    sampler = model.save_weights_and_get_sampling_client(record_stability_info=True).result()
    old = data_of(sampler)
    assert DEVIATION not in step(model, data_of(sampler, temperature=0.5))
    assert DEVIATION not in step(model, old)


def test_metrics_have_the_deviation_since_the_start(
    model: tinker.TrainingClient, sdk_server: serving.Server
) -> None:
    sampler = model.save_weights_and_get_sampling_client(record_stability_info=True).result()
    before = gauges(sdk_server)
    data = data_of(sampler)
    step(model, data)
    after = gauges(sdk_server)
    name = "tinkercloud_on_policy_{}"
    assert after[name.format("tokens")] - before[name.format("tokens")] == num_tokens(data)
    assert 0 <= after[name.format("ratio_deviation_max")] < 1e-6
    mean = after[name.format("logprob_deviation_mean")]
    assert 0 <= mean < 1e-6


def gauges(server: serving.Server) -> dict[str, float]:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    pairs = (line.split(" ") for line in lines if line.startswith("tinkercloud_on_policy"))
    return {name: float(value) for name, value in pairs}
