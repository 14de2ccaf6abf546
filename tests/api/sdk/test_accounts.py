"""How the official SDK, and our client, take it that a key is over its quota."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

import tinker_gmi
from tests.api.thread_server import ADAM, GREEDY, MODEL, PROMPT, datum, thread_server
from tinkercloud.storage.keys import KeyStore
from tinkercloud.storage.quota import Quota

LONG = [datum([1] * 1001) for _ in range(62)]  # 62,000 tokens


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, KeyStore]]:
    with thread_server(tmp_path / "data") as (url, _):
        store = KeyStore(tmp_path / "data")
        yield url, store
        store.close()


def test_the_sdk_waits_for_tokens_and_goes_on(server: tuple[str, KeyStore]) -> None:
    url, keys = server
    key = keys.add("kim", quota=Quota(tokens_per_minute=60_000))
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(MODEL, rank=4).result()
    began = time.monotonic()
    training.forward_backward(LONG, "cross_entropy").result()  # 2 s of the quota too much
    step = training.optim_step(ADAM)
    sampler = service.create_sampling_client(base_model=MODEL).result()
    sample = sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY)
    assert step.result().metrics is not None
    assert len(sample.result().sequences[0].tokens) == 4
    assert 1 < time.monotonic() - began < 20
    service.close("success").result()


def test_more_samples_than_may_be_queued_all_end(server: tuple[str, KeyStore]) -> None:
    url, keys = server
    key = keys.add("kim", quota=Quota(queued=3))
    service = tinker.ServiceClient(base_url=url, api_key=key)
    sampler = service.create_sampling_client(base_model=MODEL).result()
    futures = [sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY) for _ in range(8)]
    assert {tuple(f.result().sequences[0].tokens) for f in futures} == {
        tuple(futures[0].result().sequences[0].tokens)
    }
    service.close("success").result()


def test_a_model_beyond_the_quota_is_an_error_at_once(server: tuple[str, KeyStore]) -> None:
    url, keys = server
    key = keys.add("kim", quota=Quota(models=1))
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(MODEL, rank=4).result()
    began = time.monotonic()
    with pytest.raises(tinker.RateLimitError, match="this key's quota is 1; finish a session"):
        service.create_lora_training_client(MODEL, rank=4).result()
    with (
        tinker_gmi.ServiceClient(base_url=url, api_key=key) as ours,
        pytest.raises(tinker_gmi.RateLimitError, match="this key's quota is 1"),
    ):
        ours.create_lora_training_client(MODEL, rank=4).result()
    assert time.monotonic() - began < 5
    assert training.optim_step(ADAM).result().metrics is not None
    service.close("success").result()


def test_a_checkpoint_beyond_the_quota_fails_and_training_goes_on(
    server: tuple[str, KeyStore],
) -> None:
    url, keys = server
    key = keys.add("kim", quota=Quota(checkpoint_bytes=10))
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(MODEL, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="the quota of this key is 10"):
        training.save_state("one").result()
    assert training.optim_step(ADAM).result().metrics is not None
    service.close("success").result()


def test_a_published_checkpoint_is_the_other_users_to_read_until_it_is_not(
    server: tuple[str, KeyStore],
) -> None:
    url, keys = server
    anns, bobs = ({"base_url": url, "api_key": keys.add(user)} for user in ("ann", "bob"))
    ann, bob = tinker.ServiceClient(**anns), tinker.ServiceClient(**bobs)
    training = ann.create_lora_training_client(MODEL, rank=4).result()
    training.forward_backward(LONG[:1], "cross_entropy")
    training.optim_step(ADAM).result()
    weights = training.save_weights_for_sampler("shared").result().path
    state = training.save_state("shared").result().path
    owner, reader = tinker.RestClient(**anns), tinker.RestClient(**bobs)

    def tokens(service: tinker.ServiceClient) -> list[int]:
        sampler = service.create_sampling_client(model_path=weights).result()
        answer = sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result()
        return list(answer.sequences[0].tokens)

    def refused() -> None:
        for call in (
            lambda: tokens(bob),
            lambda: bob.create_training_client_from_state(state).result(),
            lambda: reader.get_weights_info_by_tinker_path(state).result(),
            lambda: reader.publish_checkpoint_from_tinker_path(state).result(),
            lambda: reader.delete_checkpoint_from_tinker_path(state).result(),
        ):
            with pytest.raises(tinker.NotFoundError):
                call()

    refused()
    for path in (weights, state):
        owner.publish_checkpoint_from_tinker_path(path).result()
    assert tokens(bob) == tokens(ann)
    assert reader.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    loaded = bob.create_training_client_from_state(state).result()
    loss = loaded.forward(LONG[:1], "cross_entropy").result().metrics["loss:sum"]
    assert loss == training.forward(LONG[:1], "cross_entropy").result().metrics["loss:sum"]
    with pytest.raises(tinker.NotFoundError):  # to read it is not to own it
        reader.delete_checkpoint_from_tinker_path(state).result()
    for path in (weights, state):
        owner.unpublish_checkpoint_from_tinker_path(path).result()
    refused()
    assert isinstance(loaded.optim_step(ADAM).result(), types.OptimStepResponse)  # it is bob's
    for service in (ann, bob):
        service.close("success").result()
