"""Our own client against a real server process on the fake backend: the specification's
transcripts 17.1-17.3."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

import tinker_gmi as tinker
from tests import serving

ADAM = tinker.AdamParams(learning_rate=0.1)
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def service(fake_server: serving.Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=fake_server.base_url, api_key=fake_server.api_key) as client:
        yield client


@pytest.fixture
def base_model(service: tinker.ServiceClient) -> str:
    name = service.get_server_capabilities().supported_models[0].model_name
    assert name is not None
    return name


@pytest.fixture
def training(service: tinker.ServiceClient, base_model: str) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model, rank=4, seed=1).result(timeout=30)


def datum(tokens: list[int]) -> tinker.Datum:
    targets = [*tokens[1:], tokens[0]]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(tokens)},
    )


def test_a_few_steps_lower_the_loss(training: tinker.TrainingClient) -> None:
    data = [datum([1, 2, 3, 4]), datum([4, 3, 2])]
    losses = []
    for _ in range(5):
        future = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(ADAM)
        output = future.result(timeout=30)
        step.result(timeout=30)
        losses.append(output.metrics["loss:sum"])
        assert [len(o["logprobs"].data) for o in output.loss_fn_outputs] == [4, 3]
    assert losses[-1] < losses[0]


def test_a_custom_loss_trains(training: tinker.TrainingClient) -> None:
    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]):
        return -sum(lp.sum() for lp in logprobs), {"num": float(len(data))}

    data = [datum([1, 2, 3, 4])]
    plain = training.forward(data, "cross_entropy").result(timeout=30)
    custom = training.forward_backward_custom(data, loss_fn).result(timeout=30)
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert custom.metrics["num"] == 1.0
    training.optim_step(ADAM).result(timeout=30)
    after = training.forward(data, "cross_entropy").result(timeout=30)
    assert after.metrics["loss:sum"] < plain.metrics["loss:sum"]


def test_a_seeded_sample_is_the_same_from_the_ephemeral_and_the_named_sampler(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    params = tinker.SamplingParams(max_tokens=5, seed=7, temperature=1.0, stop=[])
    ephemeral = training.save_weights_and_get_sampling_client().result(timeout=30)
    path = training.save_weights_for_sampler("named").result(timeout=30).path
    named = service.create_sampling_client(model_path=path).result(timeout=30)
    first, second = (
        client.sample(PROMPT, 2, params, include_prompt_logprobs=True).result(timeout=30)
        for client in (ephemeral, named)
    )
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert len({s.sequence_id for s in (*first.sequences, *second.sequences)}) == 4
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert first.prompt_logprobs == named.compute_logprobs(PROMPT).result(timeout=30)


def test_prompt_tokens_have_alternatives_and_only_the_last_are_scored(
    service: tinker.ServiceClient, base_model: str
) -> None:
    sampler = service.create_sampling_client(base_model=base_model).result(timeout=30)
    sample = sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1), prompt_alt_tokens_k=4)
    alternatives = sample.result(timeout=30).prompt_alt_tokens
    assert alternatives is not None
    assert alternatives.tokens.shape == alternatives.logprobs.shape == [2, 4]
    every = sampler.compute_logprobs(PROMPT).result(timeout=30)
    assert None not in every[1:]
    last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result(timeout=30)
    assert last[-1] == every[-1]
    assert every[-2] not in last


def test_loaded_state_is_what_was_saved(training: tinker.TrainingClient) -> None:
    data = [datum([1, 2, 3, 4])]
    before = training.forward(data, "cross_entropy").result(timeout=30)
    path = training.save_state("before").result(timeout=30).path
    training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM)
    training.load_state_with_optimizer(path)
    after = training.forward(data, "cross_entropy").result(timeout=30)
    assert after.metrics["loss:sum"] == before.metrics["loss:sum"]


def test_saved_state_goes_on_where_it_was(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    data = [datum([1, 2, 3, 4])]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM)
    path = training.save_state("state").result(timeout=30).path
    before = training.forward(data, "cross_entropy").result(timeout=30)
    resumed = service.create_training_client_from_state_with_optimizer(path).result(timeout=30)
    after = resumed.forward(data, "cross_entropy").result(timeout=30)
    assert after.metrics["loss:sum"] == pytest.approx(before.metrics["loss:sum"], rel=1e-6)


def test_failures_name_their_cause_and_leave_the_client_usable(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    with pytest.raises(tinker.RequestFailedError) as caught:
        training.forward_backward([datum([1, 2])], "no_such_loss").result(timeout=30)
    assert caught.value.category == "user"
    with pytest.raises(tinker.BadRequestError, match="not served"):
        service.create_lora_training_client("nobody/nothing").result(timeout=30)
    assert training.optim_step(ADAM).result(timeout=30).metrics is not None


def test_a_wrong_key_is_refused(fake_server: serving.Server) -> None:
    with (
        tinker.ServiceClient(base_url=fake_server.base_url, api_key="tml-wrong") as client,
        pytest.raises(tinker.AuthenticationError),
    ):
        client.get_server_capabilities()


def test_forty_samples_at_once(service: tinker.ServiceClient, base_model: str) -> None:
    async def run() -> list[tinker.SampleResponse]:
        sampler = await service.create_sampling_client_async(base_model=base_model)
        params = tinker.SamplingParams(max_tokens=3, seed=1)
        calls = [sampler.sample_async(PROMPT, 1, params) for _ in range(40)]
        return await asyncio.gather(*calls)

    samples = asyncio.run(run())
    assert len({tuple(s.sequences[0].tokens) for s in samples}) == 1
