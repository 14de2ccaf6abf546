"""The central scenarios by the official SDK and by ours: one test, both clients, a server process
on the fake backend."""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import serving
from tests.api.sdk.scene import Scene, end, training
from tests.api.thread_server import MODEL, thread_server


def test_supervised_steps_lower_the_loss(scene: Scene, service: Any) -> None:
    client = training(service)
    losses = [scene.train(client) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_get_info_answers_after_creation(scene: Scene, service: Any) -> None:
    info = training(service, rank=4).get_info()
    assert info.model_data.model_name == MODEL
    assert (info.is_lora, info.lora_rank) == (True, 4)


def test_a_reinforcement_step_runs(scene: Scene, service: Any) -> None:
    client = training(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = scene.types.SamplingParams(max_tokens=5, seed=3)
    response = sampler.sample(scene.prompt, num_samples=4, sampling_params=params).result()
    assert len(response.sequences) == 4
    data = [
        scene.types.Datum(
            model_input=scene.types.ModelInput.from_ints([1, 2, 3, *sequence.tokens[:-1]]),
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
    assert client.optim_step(scene.adam).result().metrics["unclipped_grad_l2:mean"] > 0


def test_compute_logprobs_scores_the_prompt(scene: Scene, service: Any) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    logprobs = sampler.compute_logprobs(scene.prompt).result()
    assert logprobs[0] is None
    assert len(logprobs) == 3
    assert all(value < 0 for value in logprobs[1:])


def test_draws_over_a_prompt_are_seeded_and_have_the_models_logprobs(
    scene: Scene, service: Any
) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    params = scene.types.SamplingParams(max_tokens=1, temperature=0.7, seed=5)

    def draws(prompt: list[int], k: int) -> Any:
        sample = sampler.sample(
            scene.types.ModelInput.from_ints(prompt), 1, params, prompt_alt_tokens_k=k
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
            prompt = scene.types.ModelInput.from_ints(scored)
            logprob = sampler.compute_logprobs(prompt).result()[-1]
            assert first.logprobs.to_torch()[row, column] == pytest.approx(logprob, abs=1e-5)


def test_trainer_and_sampler_agree(scene: Scene, service: Any) -> None:
    client = training(service)
    scene.train(client)
    forward = client.forward([scene.datum([1, 2, 3])], "cross_entropy").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(scene.prompt).result()
    trained = forward.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(trained, scored[1:], atol=1e-5)


def test_training_resumes_from_a_saved_state(scene: Scene, service: Any) -> None:
    client = training(service)
    scene.train(client)
    path = client.save_state("ck1", ttl_seconds=3600).result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert [scene.train(resumed) for _ in range(3)] == [scene.train(client) for _ in range(3)]


def test_a_saved_sampler_is_sampled_by_its_path(scene: Scene, service: Any) -> None:
    client = training(service)
    scene.train(client)
    live = client.save_weights_and_get_sampling_client().result()
    path = client.save_weights_for_sampler("s1").result().path
    saved = service.create_sampling_client(model_path=path).result()
    tokens = [
        sampler.sample(scene.prompt, num_samples=1, sampling_params=scene.greedy)
        .result()
        .sequences[0]
        .tokens
        for sampler in (live, saved)
    ]
    assert list(tokens[0]) == list(tokens[1])


def test_failures_are_the_users_and_the_client_goes_on(scene: Scene, service: Any) -> None:
    client = training(service)
    with pytest.raises(scene.sdk.RequestFailedError, match="lacks") as failed:
        client.forward_backward(
            [
                scene.types.Datum(
                    model_input=scene.prompt, loss_fn_inputs={"weights": [1.0, 1.0, 1.0]}
                )
            ],
            "cross_entropy",
        ).result()
    assert failed.value.category == scene.types.RequestErrorCategory.User
    scene.train(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    with pytest.raises(scene.sdk.RequestFailedError, match="2048"):
        sampler.sample(scene.types.ModelInput.from_ints([1] * 3000), 1, scene.greedy).result()
    assert len(sampler.sample(scene.prompt, 1, scene.greedy).result().sequences) == 1


def test_an_unknown_base_model_is_refused_with_the_list(scene: Scene, service: Any) -> None:
    with pytest.raises(scene.sdk.BadRequestError, match=MODEL):
        service.create_lora_training_client("no/such").result()


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("compress", [True, False])
def test_many_chunks_train_like_one(
    scene: Scene, tmp_path: Path, parallel: bool, compress: bool
) -> None:
    flags = {
        "fwdbwd_max_chunk_len": 2,
        "parallel_fwdbwd_chunks": parallel,
        "proto_compress_fwdbwd": compress,
    }
    with thread_server(tmp_path, **flags) as (base_url, key):
        service = scene.connect(base_url=base_url, api_key=key)
        client = training(service)
        chunked = [scene.train(client) for _ in range(2)]
        failing = client.forward_backward(scene.data, "nonsense")
        with pytest.raises(scene.sdk.RequestFailedError, match="not known"):
            failing.result()
        chunked.append(scene.train(client))
        end(service)
    with thread_server(tmp_path) as (base_url, key):
        service = scene.connect(base_url=base_url, api_key=key)
        whole = [scene.train(client) for client in [training(service)] for _ in range(3)]
        end(service)
    assert chunked == pytest.approx(whole, rel=1e-9)


def test_a_custom_loss_over_two_chunks_has_the_gradient_of_autograd(
    scene: Scene, tmp_path: Path
) -> None:
    def squared(data, logprobs):
        loss = sum((values**2).sum() for values in logprobs)
        return loss, {"mine": loss.item()}

    with thread_server(tmp_path, fwdbwd_max_chunk_len=3) as (base_url, key):
        service = scene.connect(base_url=base_url, api_key=key)
        custom, plain = training(service), training(service)
        outputs = plain.forward(scene.data, "cross_entropy").result().loss_fn_outputs
        logprobs = [
            torch.tensor(fields["logprobs"].to_numpy(), requires_grad=True) for fields in outputs
        ]
        loss, _ = squared(scene.data, logprobs)
        loss.backward()
        result = custom.forward_backward_custom(scene.data, squared).result()
        weighted = [
            scene.types.Datum(
                model_input=item.model_input,
                loss_fn_inputs={
                    "target_tokens": item.loss_fn_inputs["target_tokens"],
                    "weights": (-values.grad).numpy(),
                },
            )
            for item, values in zip(scene.data, logprobs, strict=True)
        ]
        plain.forward_backward(weighted, "cross_entropy").result()
        norms = [
            client.optim_step(scene.adam).result().metrics["unclipped_grad_l2:mean"]
            for client in (custom, plain)
        ]
        end(service)
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["mine"] == pytest.approx(loss.item(), rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_killed_server_restarts_and_its_clients_go_on(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving.start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
        for name, value in server.sdk_environment.items():
            monkeypatch.setenv(name, value)
        service = scene.connect()
        client = training(service)
        scene.train(client)
        path = client.save_state("ck").result().path
        live = client.save_weights_and_get_sampling_client().result()
        before = live.sample(scene.prompt, 1, scene.greedy).result().sequences[0]
        server.restart(how=signal.SIGKILL)
        after = live.sample(scene.prompt, 1, scene.greedy).result().sequences[0]
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
        went_on = scene.train(client)
        # the checkpoint has what the model had: the same next step from it
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert scene.train(resumed) == went_on
        end(service)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_samples_in_flight_when_the_server_ends_are_drawn_after_its_restart(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    with serving.start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
        for name, value in server.sdk_environment.items():
            monkeypatch.setenv(name, value)
        service = scene.connect()
        sampler = service.create_sampling_client(base_model=MODEL).result()
        sampler.sample(scene.prompt, 1, scene.greedy).result()
        slow = scene.types.SamplingParams(max_tokens=1000, stop=[], seed=1)
        undisturbed = sampler.sample(scene.prompt, 1, slow).result().sequences[0]
        unseeded = scene.types.SamplingParams(max_tokens=1000, stop=[])
        futures = [sampler.sample(scene.prompt, 1, slow) for _ in range(8)]
        others = [sampler.sample(scene.prompt, 1, unseeded) for _ in range(2)]
        time.sleep(0.3)
        server.restart(how=how)
        for future in futures:
            sequence = future.result(timeout=60).sequences[0]
            assert sequence.tokens == undisturbed.tokens
            assert sequence.logprobs == undisturbed.logprobs
        first, second = (future.result(timeout=60).sequences[0].tokens for future in others)
        assert len(first) == len(second) == 1000
        assert first != second
        end(service)


def test_a_pipelined_loop_goes_on_over_a_kill_in_its_order(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed with steps in flight, others are submitted while it is away, and all
    have the results of the undisturbed run."""
    with serving.start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
        for name, value in server.sdk_environment.items():
            monkeypatch.setenv(name, value)
        service = scene.connect()
        steady, killed = training(service), training(service)
        undisturbed = [scene.train(steady) for _ in range(12)]

        data = scene.data

        def submit(count: int) -> list[Any]:
            return [
                (killed.forward_backward(data, "cross_entropy"), killed.optim_step(scene.adam))
                for _ in range(count)
            ]

        steps = submit(6)
        steps[1][0].result(timeout=60)
        server.stop(how=signal.SIGKILL)
        steps += submit(6)
        server.start()
        losses = [loss.result(timeout=60).metrics["loss:sum"] for loss, _ in steps]
        assert losses == undisturbed
        assert all(step.result(timeout=60).metrics for _, step in steps)
        state = killed.forward(scene.data, "cross_entropy").result().metrics["loss:sum"]
        assert state == steady.forward(scene.data, "cross_entropy").result().metrics["loss:sum"]
        end(service)
