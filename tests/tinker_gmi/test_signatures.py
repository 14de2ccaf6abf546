"""The blocking and the async form of every operation have the types that the client promises.

basedpyright checks this file too, in strict mode: there `assert_type` fails for another type, and
the `ignore` beside a wrong call fails where the call is accepted.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Iterator
from typing import Any, assert_type

import pytest

import tinker_gmi as tinker
from tests.mock_api import MockApi
from tinker_gmi import APIFuture, ClientFuture, SamplingClient, TrainingClient, types

ADAM = tinker.AdamParams(learning_rate=0.5)
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
PARAMS = tinker.SamplingParams(max_tokens=2)
PATH = "tinker://R/weights/a"
DATUM = tinker.Datum.model_validate(
    {
        "model_input": PROMPT,
        "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    }
)


@pytest.fixture
def service() -> Iterator[tinker.ServiceClient]:
    with MockApi().client() as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny").result(timeout=10)


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="tiny").result(timeout=10)


def test_blocking_training_methods_return_futures_of_their_results(
    training: TrainingClient,
) -> None:
    loss = "cross_entropy"
    forward = assert_type(training.forward([DATUM], loss), APIFuture[types.ForwardBackwardOutput])
    backward = assert_type(
        training.forward_backward([DATUM], loss, loss_fn_config={"a": 1.0}),
        APIFuture[types.ForwardBackwardOutput],
    )
    step = assert_type(training.optim_step(ADAM), APIFuture[types.OptimStepResponse])
    state = assert_type(training.save_state("a"), APIFuture[types.SaveWeightsResponse])
    weights = assert_type(
        training.save_weights_for_sampler("b"), APIFuture[types.SaveWeightsForSamplerResponse]
    )
    for future in (forward, backward, step, state, weights):
        future.result(timeout=10)
    assert_type(training.get_info(), types.GetInfoResponse)


async def test_async_training_methods_return_the_same_futures(training: TrainingClient) -> None:
    loss = "cross_entropy"
    forward = assert_type(
        await training.forward_async([DATUM], loss), APIFuture[types.ForwardBackwardOutput]
    )
    backward = assert_type(
        await training.forward_backward_async([DATUM], loss, loss_fn_config={"a": 1.0}),
        APIFuture[types.ForwardBackwardOutput],
    )
    step = assert_type(
        await training.optim_step_async(adam_params=ADAM), APIFuture[types.OptimStepResponse]
    )
    state = assert_type(await training.save_state_async("a"), APIFuture[types.SaveWeightsResponse])
    weights = assert_type(
        await training.save_weights_for_sampler_async("b", user_metadata={"k": "v"}),
        APIFuture[types.SaveWeightsForSamplerResponse],
    )
    for future in (forward, backward, step, state, weights):
        await future
    assert assert_type(await training.get_info_async(), types.GetInfoResponse).model_id


def loss_fn(data: list[tinker.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return sum(logprob.sum() for logprob in logprobs), {"datums": float(len(data))}


async def test_both_forms_of_a_custom_loss_return_a_future(training: TrainingClient) -> None:
    blocking = training.forward_backward_custom([DATUM], loss_fn)
    awaited = await training.forward_backward_custom_async([DATUM], loss_fn)
    for future in (blocking, awaited):
        assert_type(future, APIFuture[types.ForwardBackwardOutput])
        assert (await future).metrics["datums"] == 1.0


def test_blocking_samples_are_futures(sampler: SamplingClient) -> None:
    sample = assert_type(sampler.sample(PROMPT, 1, PARAMS), APIFuture[tinker.SampleResponse])
    assert assert_type(sample.result(timeout=10), tinker.SampleResponse).sequences
    logprobs = assert_type(sampler.compute_logprobs(PROMPT), APIFuture[list[float | None]])
    assert len(logprobs.result(timeout=10)) == 3
    assert assert_type(sampler.get_base_model(), str) == "tiny"


async def test_async_samples_are_results(sampler: SamplingClient) -> None:
    sample = await sampler.sample_async(PROMPT, num_samples=1, sampling_params=PARAMS)
    assert assert_type(sample, tinker.SampleResponse).sequences
    logprobs = assert_type(await sampler.compute_logprobs_async(PROMPT), list[float | None])
    assert len(logprobs) == 3
    assert assert_type(await sampler.get_base_model_async(), str) == "tiny"


def test_blocking_create_methods_return_futures_of_clients(
    service: tinker.ServiceClient, training: TrainingClient
) -> None:
    clients = [
        assert_type(service.create_lora_training_client("tiny"), ClientFuture[TrainingClient]),
        assert_type(service.create_training_client_from_state(PATH), ClientFuture[TrainingClient]),
        assert_type(
            service.create_training_client_from_state_with_optimizer(PATH),
            ClientFuture[TrainingClient],
        ),
    ]
    assert len({client.result(timeout=10).model_id for client in clients}) == 3
    samplers = [
        assert_type(service.create_sampling_client(PATH), ClientFuture[SamplingClient]),
        assert_type(training.create_sampling_client(PATH), ClientFuture[SamplingClient]),
        assert_type(training.save_weights_and_get_sampling_client(), ClientFuture[SamplingClient]),
    ]
    assert len({client.result(timeout=10).sampling_session_id for client in samplers}) == 3
    capabilities = service.get_server_capabilities()
    assert assert_type(capabilities, types.GetServerCapabilitiesResponse).supported_models


async def test_async_create_methods_return_clients(
    service: tinker.ServiceClient, training: TrainingClient
) -> None:
    resume = service.create_training_client_from_state_with_optimizer_async
    clients = [
        assert_type(await service.create_lora_training_client_async("tiny"), TrainingClient),
        assert_type(await service.create_training_client_from_state_async(PATH), TrainingClient),
        assert_type(await resume(PATH, weights_access_token=None), TrainingClient),
    ]
    assert len({client.model_id for client in clients}) == 3
    samplers = [
        assert_type(await service.create_sampling_client_async(PATH), SamplingClient),
        assert_type(await training.create_sampling_client_async(PATH), SamplingClient),
        assert_type(await training.save_weights_and_get_sampling_client_async(), SamplingClient),
    ]
    assert len({client.sampling_session_id for client in samplers}) == 3
    capabilities = await service.get_server_capabilities_async()
    assert assert_type(capabilities, types.GetServerCapabilitiesResponse).supported_models


async def test_a_wrong_argument_of_either_form_is_a_type_error(sampler: SamplingClient) -> None:
    with pytest.raises(TypeError, match="seed"):
        sampler.sample(PROMPT, 1, PARAMS, seed=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="seed"):
        await sampler.sample_async(PROMPT, 1, PARAMS, seed=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="sampling_params"):
        await sampler.sample_async(PROMPT, 1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="num_samples"):
        await sampler.sample_async(PROMPT, "x", PARAMS)  # pyright: ignore[reportArgumentType]
