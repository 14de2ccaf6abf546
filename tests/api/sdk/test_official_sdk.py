"""The official SDK and its command line against a server process on the fake backend."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli as cli

from tests import serving
from tests.api.thread_server import ADAM, DATA, GREEDY, MODEL, PROMPT, datum, thread_server


@pytest.fixture
def service(sdk_server: serving.Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(user_metadata={"k": "v"})
    yield client
    client.close("success").result()


def training(service: tinker.ServiceClient, rank: int = 8) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=rank, seed=1).result()


def train(client: tinker.TrainingClient, data: list[types.Datum] = DATA) -> float:
    """One pipelined step; the loss before it."""
    loss = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(ADAM)
    assert step.result().metrics["unclipped_grad_l2:mean"] > 0
    return loss.result().metrics["loss:sum"]


def test_supervised_steps_lower_the_loss(service: tinker.ServiceClient) -> None:
    client = training(service)
    losses = [train(client) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_get_info_answers_after_creation(service: tinker.ServiceClient) -> None:
    info = training(service, rank=4).get_info()
    assert info.model_data.model_name == MODEL
    assert (info.is_lora, info.lora_rank) == (True, 4)


def test_metrics_of_rl_are_the_same_in_chunks_and_at_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(rng.integers(0, 1000, n).tolist()),
            loss_fn_inputs={
                "target_tokens": rng.integers(0, 1000, n),
                "logprobs": (-7 + rng.normal(size=n)).astype(np.float32),
                "advantages": rng.normal(size=n).astype(np.float32),
            },
        )
        for n in (3, 8, 2, 5, 1)
    ]
    found = []
    for max_datums in (2, 1024):
        folder = tmp_path / str(max_datums)
        with thread_server(folder, fwdbwd_max_chunk_len=max_datums) as (base_url, api_key):
            client = training(tinker.ServiceClient(base_url=base_url, api_key=api_key))
            found.append(client.forward_backward(data, "ppo").result().metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert {"ppo_kl:mean", "pg_clipfrac:mean", "ratio:mean", "ratio:max"} <= set(found[0])
    assert 0 < found[0]["pg_clipfrac:mean"] < 1


def test_a_reinforcement_step_runs(service: tinker.ServiceClient) -> None:
    client = training(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=5, seed=3)
    response = sampler.sample(PROMPT, num_samples=4, sampling_params=params).result()
    assert len(response.sequences) == 4
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3, *sequence.tokens[:-1]]),
            loss_fn_inputs={
                "target_tokens": np.array([2, 3, *sequence.tokens]),
                "logprobs": np.array([0.0, 0.0, *sequence.logprobs], dtype=np.float32),
                "advantages": np.array([0.0, 0.0] + [1.0] * len(sequence.tokens), dtype=np.float32),
            },
        )
        for sequence in response.sequences
    ]
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    result = client.forward_backward(data, "ppo", config).result()
    num_tokens = sum(len(sequence.tokens) for sequence in response.sequences)
    assert result.metrics["loss:sum"] == pytest.approx(-num_tokens, rel=1e-4)  # ratios are 1
    assert client.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] > 0


def test_compute_logprobs_scores_the_prompt(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    logprobs = sampler.compute_logprobs(PROMPT).result()
    assert logprobs[0] is None
    assert len(logprobs) == 3
    assert all(value < 0 for value in logprobs[1:])


def test_draws_over_a_prompt_are_seeded_and_have_the_models_logprobs(
    service: tinker.ServiceClient,
) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=1, temperature=0.7, seed=5)

    def draws(prompt: list[int], k: int) -> types.PromptAltTokens:
        sample = sampler.sample(
            types.ModelInput.from_ints(prompt), 1, params, prompt_alt_tokens_k=k
        )
        alternatives = sample.result().prompt_alt_tokens
        assert alternatives is not None
        return alternatives

    first = draws([1, 2, 3, 9], 4)
    tokens = first.tokens.to_torch()
    assert tokens.shape == first.logprobs.to_torch().shape == (3, 4)
    assert torch.equal(draws([1, 2, 3, 9], 4).tokens.to_torch(), tokens)
    for column in range(4):
        others = [1, *tokens[:, column].tolist()]
        for row in range(3):
            scored = [*[1, 2, 3, 9][: row + 1], others[row + 1]]
            prompt = types.ModelInput.from_ints(scored)
            logprob = sampler.compute_logprobs(prompt).result()[-1]
            assert first.logprobs.to_torch()[row, column] == pytest.approx(logprob, abs=1e-5)


def test_trainer_and_sampler_agree(service: tinker.ServiceClient) -> None:
    client = training(service)
    train(client)
    forward = client.forward([datum([1, 2, 3])], "cross_entropy").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(PROMPT).result()
    trained = forward.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(trained, scored[1:], atol=1e-5)


def test_training_resumes_from_a_saved_state(service: tinker.ServiceClient) -> None:
    client = training(service)
    train(client)
    path = client.save_state("ck1", ttl_seconds=3600).result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert [train(resumed) for _ in range(3)] == [train(client) for _ in range(3)]


def test_a_saved_sampler_is_sampled_by_its_path(service: tinker.ServiceClient) -> None:
    client = training(service)
    train(client)
    live = client.save_weights_and_get_sampling_client().result()
    path = client.save_weights_for_sampler("s1").result().path
    saved = service.create_sampling_client(model_path=path).result()
    tokens = [
        sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result().sequences[0].tokens
        for sampler in (live, saved)
    ]
    assert list(tokens[0]) == list(tokens[1])


def test_failures_are_the_users_and_the_client_goes_on(service: tinker.ServiceClient) -> None:
    client = training(service)
    with pytest.raises(tinker.RequestFailedError, match="lacks") as failed:
        client.forward_backward(
            [types.Datum(model_input=PROMPT, loss_fn_inputs={"weights": [1.0, 1.0, 1.0]})],
            "cross_entropy",
        ).result()
    assert failed.value.category == types.RequestErrorCategory.User
    train(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="2048"):
        sampler.sample(types.ModelInput.from_ints([1] * 3000), 1, GREEDY).result()
    assert len(sampler.sample(PROMPT, 1, GREEDY).result().sequences) == 1


def test_an_unknown_base_model_is_refused_with_the_list(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match=MODEL):
        service.create_lora_training_client("no/such").result()


def test_three_hundred_samples_at_once(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    futures = [
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=seed))
        for seed in range(300)
    ]
    drawn = {tuple(future.result().sequences[0].tokens) for future in futures}
    assert len(drawn) > 200


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("compress", [True, False])
def test_many_chunks_train_like_one(tmp_path: Path, parallel: bool, compress: bool) -> None:
    flags = {
        "fwdbwd_max_chunk_len": 2,
        "parallel_fwdbwd_chunks": parallel,
        "proto_compress_fwdbwd": compress,
    }
    with thread_server(tmp_path, **flags) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        client = training(service)
        chunked = [train(client) for _ in range(2)]
        failing = client.forward_backward(DATA, "nonsense")
        with pytest.raises(tinker.RequestFailedError, match="not known"):
            failing.result()
        chunked.append(train(client))
        service.close("success").result()
    with thread_server(tmp_path) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        whole = [train(client) for client in [training(service)] for _ in range(3)]
        service.close("success").result()
    assert chunked == pytest.approx(whole, rel=1e-9)


def test_a_custom_loss_over_two_chunks_has_the_gradient_of_autograd(tmp_path: Path) -> None:
    def squared(data, logprobs):
        loss = sum((values**2).sum() for values in logprobs)
        return loss, {"mine": loss.item()}

    with thread_server(tmp_path, fwdbwd_max_chunk_len=3) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        custom, plain = training(service), training(service)
        outputs = plain.forward(DATA, "cross_entropy").result().loss_fn_outputs
        logprobs = [
            torch.tensor(fields["logprobs"].to_numpy(), requires_grad=True) for fields in outputs
        ]
        loss, _ = squared(DATA, logprobs)
        loss.backward()
        result = custom.forward_backward_custom(DATA, squared).result()
        weighted = [
            types.Datum(
                model_input=item.model_input,
                loss_fn_inputs={
                    "target_tokens": item.loss_fn_inputs["target_tokens"],
                    "weights": (-values.grad).numpy(),
                },
            )
            for item, values in zip(DATA, logprobs, strict=True)
        ]
        plain.forward_backward(weighted, "cross_entropy").result()
        norms = [
            client.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"]
            for client in (custom, plain)
        ]
        service.close("success").result()
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["mine"] == pytest.approx(loss.item(), rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def command_line(*arguments: str) -> str:
    finished = CliRunner().invoke(cli, arguments)
    assert finished.exit_code == 0, finished.output
    return finished.output


def test_the_command_line_lists_and_changes_checkpoints(
    service: tinker.ServiceClient,
) -> None:
    client = training(service)
    path = client.save_state("listed").result().path
    run_id = client.get_info().model_id
    assert MODEL in command_line("model", "list")
    assert run_id in command_line("--format", "json", "run", "list")
    assert path in command_line("--format", "json", "checkpoint", "list")
    command_line("checkpoint", "set-ttl", path, "--ttl", "7200")
    rest = tinker.RestClient()
    [listed] = rest.list_checkpoints(run_id).result().checkpoints
    assert listed.expires_at is not None
    command_line("checkpoint", "set-ttl", path, "--remove")
    command_line("checkpoint", "delete", path, "--yes")
    assert rest.list_checkpoints(run_id).result().checkpoints == []


def test_a_killed_server_restarts_and_its_clients_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving.start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
        for name, value in server.sdk_environment.items():
            monkeypatch.setenv(name, value)
        service = tinker.ServiceClient()
        client = training(service)
        train(client)
        path = client.save_state("ck").result().path
        live = client.save_weights_and_get_sampling_client().result()
        before = live.sample(PROMPT, 1, GREEDY).result().sequences[0]
        server.restart(how=signal.SIGKILL)
        after = live.sample(PROMPT, 1, GREEDY).result().sequences[0]
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
        went_on = train(client)
        # the checkpoint has what the model had: the same next step from it
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed) == went_on
        service.close("success").result()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_samples_in_flight_when_the_server_ends_are_drawn_after_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    with serving.start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
        for name, value in server.sdk_environment.items():
            monkeypatch.setenv(name, value)
        service = tinker.ServiceClient()
        sampler = service.create_sampling_client(base_model=MODEL).result()
        sampler.sample(PROMPT, 1, GREEDY).result()
        slow = types.SamplingParams(max_tokens=1000, stop=[], seed=1)
        undisturbed = sampler.sample(PROMPT, 1, slow).result().sequences[0]
        unseeded = types.SamplingParams(max_tokens=1000, stop=[])
        futures = [sampler.sample(PROMPT, 1, slow) for _ in range(8)]
        others = [sampler.sample(PROMPT, 1, unseeded) for _ in range(2)]
        time.sleep(0.3)
        server.restart(how=how)
        for future in futures:
            sequence = future.result(timeout=60).sequences[0]
            assert sequence.tokens == undisturbed.tokens
            assert sequence.logprobs == undisturbed.logprobs
        first, second = (future.result(timeout=60).sequences[0].tokens for future in others)
        assert len(first) == len(second) == 1000
        assert first != second
        service.close("success").result()


def test_a_sample_of_too_many_alternatives_fails_once_and_says_the_numbers(
    service: tinker.ServiceClient,
) -> None:
    """Not a refused POST: the client would send that again."""
    sampler = service.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints([1] * 1024)
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    begun = time.monotonic()
    future = sampler.sample(
        prompt, 1000, params, topk_prompt_logprobs=1000, topk_sample_logprobs=500
    )
    with pytest.raises(tinker.RequestFailedError, match=r"topk_prompt_logprobs 1000 x 1024"):
        future.result(timeout=30)
    assert time.monotonic() - begun < 10
