"""What both clients offer beyond the central scenarios: traced losses, handles, provenance,
optimizers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import serving
from tests.api.provenance_data import single_turn
from tests.api.sdk.scene import Scene, end, training
from tests.api.thread_server import MODEL, thread_server


@pytest.fixture
def chunked(scene: Scene, tmp_path: Path) -> Iterator[Any]:
    """A client of a server that leaves custom losses to its clients, three datums to a request."""
    with thread_server(tmp_path, fwdbwd_max_chunk_len=3) as (base_url, api_key):
        client = scene.connect(base_url=base_url, api_key=api_key)
        yield client
        end(client)


def squared(logprobs: torch.Tensor, weights: torch.Tensor):
    loss = ((logprobs * weights) ** 2).sum()
    return loss, {"custom/square:sum": loss, "custom/square:mean": loss}


def test_a_traced_loss_is_the_function_that_it_was_traced_from(scene: Scene, chunked: Any) -> None:
    def by_hand(data: list[Any], logprobs: list[torch.Tensor]):
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return sum(squared(*pair)[0] for pair in zip(logprobs, weights, strict=True)), {}

    handle = chunked.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
    assert (handle.name, handle.input_names, handle.loss_id) == ("squared", ("weights",), None)
    traced, plain = training(chunked), training(chunked)
    metrics = traced.forward_backward_custom(scene.data, handle).result().metrics
    expected = plain.forward_backward_custom(scene.data, by_hand).result().metrics
    assert metrics["loss:sum"] == pytest.approx(expected["loss:sum"])
    assert metrics["custom/square:sum"] == pytest.approx(expected["loss:sum"])
    assert metrics["custom/square:mean"] == pytest.approx(expected["loss:sum"] / 5)
    norms = {
        client.optim_step(scene.adam).result().metrics["unclipped_grad_l2:mean"]
        for client in (traced, plain)
    }
    assert len(norms) == 1


def test_a_traced_loss_is_of_its_session_and_checks_its_inputs(scene: Scene, chunked: Any) -> None:
    handle = chunked.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
    client = training(chunked)
    targets = {"target_tokens": [1, 2, 3]}
    lacking = scene.types.Datum(model_input=scene.prompt, loss_fn_inputs=targets)
    with pytest.raises(ValueError, match="weights"):
        client.forward_backward_custom([lacking], handle)
    elsewhere = replace(handle, session_id="another")
    with pytest.raises(ValueError, match="session"):
        client.forward_backward_custom(scene.data, elsewhere)


def branches(logprobs: torch.Tensor):
    return (logprobs.sum() if logprobs.sum() > 0 else -logprobs.sum()), {}


def leaves_torch(logprobs: torch.Tensor):
    return logprobs.sum(), {"custom/sum:sum": logprobs.sum().item()}


def other_first(weights: torch.Tensor):
    return weights.sum(), {}


def odd_metric(logprobs: torch.Tensor):
    return logprobs.sum(), {"sum": logprobs.sum()}


@pytest.mark.parametrize("function", [branches, leaves_torch, other_first, odd_metric])
def test_a_loss_that_no_server_could_run_is_refused_at_once(service: Any, function: Any) -> None:
    with pytest.raises(ValueError, match=function.__name__):
        service.create_custom_loss(function, {"logprobs": 1}).result()


def test_a_sampler_handle_gives_the_sampler_to_others(
    scene: Scene, service: Any, sdk_server: serving.Server
) -> None:
    client = training(service)
    scene.train(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    expected = sampler.sample(scene.prompt, 1, scene.greedy).result().sequences[0].tokens
    handle = sampler.get_sampler_handle()
    assert sdk_server.api_key not in handle
    for api_key in (None, sdk_server.api_key):
        clone = scene.sdk.SamplingClient.from_sampler_handle(handle, api_key=api_key)
        sample = clone.sample(scene.prompt, 1, scene.greedy).result()
        assert list(sample.sequences[0].tokens) == list(expected)
        assert clone.get_base_model() == MODEL
        getattr(clone, "close", lambda: None)()


def test_provenance_and_stability_records_make_stable_reinforce_run(
    scene: Scene, service: Any
) -> None:
    client = training(service)
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = scene.types.SamplingParams(max_tokens=6, seed=5)
    sequences = sampler.sample(scene.prompt, 2, params).result().sequences
    data = [single_turn([1, 2, 3], each, 1.0, scene.types) for each in sequences]
    output = client.forward_backward(data, "stable_reinforce").result()
    assert len(output.loss_fn_outputs) == 2
    unrecorded = client.save_weights_and_get_sampling_client().result()
    sequences = unrecorded.sample(scene.prompt, 1, params).result().sequences
    data = [single_turn([1, 2, 3], each, 1.0, scene.types) for each in sequences]
    with pytest.raises(scene.sdk.RequestFailedError, match="record_stability_info"):
        client.forward_backward(data, "stable_reinforce").result()


def test_optimizers_are_chosen_at_creation_and_dimuon_is_refused_by_name(
    scene: Scene, service: Any
) -> None:
    adamw, dimuon = scene.types.AdamOptimizerConfig(), scene.types.DimuonOptimizerConfig()
    client = service.create_lora_training_client(MODEL, rank=8, seed=1, optimizer=adamw).result()
    assert scene.train(client) == scene.train(training(service))
    path = client.save_state("next").result().path
    resumed = service.create_training_client_from_state(path, optimizer=adamw).result()
    scene.train(resumed)
    with pytest.raises(scene.sdk.TinkerError, match="'dimuon' is not offered"):
        service.create_lora_training_client(MODEL, optimizer=dimuon).result()
    with pytest.raises(scene.sdk.TinkerError, match="'dimuon' is not offered"):
        service.create_training_client_from_state(path, optimizer=dimuon).result()
    with pytest.raises(scene.sdk.RequestFailedError, match="dimuon"):
        client.optim_step(scene.types.DimuonParams(learning_rate=0.1)).result()
