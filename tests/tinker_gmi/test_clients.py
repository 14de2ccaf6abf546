"""ServiceClient, TrainingClient and SamplingClient against a mock of the API."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

import tinker_gmi as tinker
from tests.mock_api import DROP, FAST, MockApi
from tests.waiting import wait_for
from tinker_gmi import RetryPolicy
from tinker_gmi.connection import session as session_module

ADAM = tinker.AdamParams(learning_rate=0.5)
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
PARAMS = tinker.SamplingParams(max_tokens=2)


@pytest.fixture
def api() -> MockApi:
    return MockApi()


@pytest.fixture
def service(api: MockApi) -> Iterator[tinker.ServiceClient]:
    with api.client(api_key="any key") as client:
        yield client


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=8).result(timeout=10)


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny").result(timeout=10)


def datum(target: int = 5, length: int = 2, weight: float = 1.0) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * length),
        loss_fn_inputs={"target_tokens": [target] * length, "weights": [weight] * length},
    )


# ---- start


def test_nothing_is_sent_before_first_use(api: MockApi) -> None:
    api.client().close()
    assert api.requests == []


def test_the_first_use_starts_one_session(api: MockApi, service: tinker.ServiceClient) -> None:
    first, second = (service.create_lora_training_client("tiny") for _ in range(2))
    assert {first.result(10).model_id, second.result(10).model_id} == {"S:train:0", "S:train:1"}
    assert [path for path, _ in api.requests[:2]] == ["client/config", "create_session"]
    assert len(api.bodies("create_session")) == 1


def test_a_failed_start_is_tried_again_by_the_next_call(
    api: MockApi, service: tinker.ServiceClient
) -> None:
    api.script["create_session"] = [401]
    with pytest.raises(tinker.AuthenticationError, match="scripted 401"):
        service.create_lora_training_client("tiny").result(timeout=10)
    assert service.create_lora_training_client("tiny").result(timeout=10).model_id == "S:train:0"


def test_a_server_without_client_config_is_served_with_defaults(
    api: MockApi, service: tinker.ServiceClient
) -> None:
    api.script["client/config"] = [404]
    assert service.create_lora_training_client("tiny").result(timeout=10).get_info().lora_rank == 8


def test_the_key_and_the_arguments_are_sent(api: MockApi, training: tinker.TrainingClient) -> None:
    assert {headers["x-api-key"] for headers in api.headers} == {"any key"}
    (body,) = api.bodies("create_model")
    assert body == {
        "session_id": "S",
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {
            "rank": 8,
            "train_unembed": True,
            "train_mlp": True,
            "train_attn": True,
        },
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }


def test_address_and_key_come_from_the_environment(
    api: MockApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://elsewhere/prefix/")
    monkeypatch.setenv("TINKER_API_KEY", "from the environment")
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"supported_models": []})

    with tinker.ServiceClient(http_transport=httpx.MockTransport(answer)) as client:
        assert client.get_server_capabilities().supported_models == []
    assert str(seen[-1].url) == "http://elsewhere/prefix/api/v1/get_server_capabilities"
    assert {request.headers["x-api-key"] for request in seen} == {"from the environment"}


def test_without_a_key_none_is_sent(api: MockApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with api.client() as client:
        client.get_server_capabilities()
    assert "x-api-key" not in api.headers[0]


def test_the_future_of_a_client_is_the_client(service: tinker.ServiceClient) -> None:
    assert service.create_lora_training_client("tiny").model_id == "S:train:0"


def test_clients_can_be_awaited(api: MockApi) -> None:
    async def run() -> str:
        with api.client() as service:
            training = await service.create_lora_training_client_async("tiny")
            future = await training.forward_backward_async([datum()], "cross_entropy")
            output = await future
            assert output.metrics["loss:sum"] == pytest.approx(1.0)
            sampler = await training.save_weights_and_get_sampling_client_async()
            sample = await sampler.sample_async(PROMPT, 1, PARAMS)
            return sample.sequences[0].stop_reason

    assert asyncio.run(run()) == "stop"


# ---- order and retries


def test_sequence_numbers_follow_the_order_of_the_calls(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    futures = []
    for _ in range(3):
        futures.append(training.forward_backward([datum()], "cross_entropy"))
        futures.append(training.optim_step(ADAM))
    futures.append(training.save_state("a"))
    futures.append(training.forward([datum()], "cross_entropy"))
    futures.append(training.save_weights_for_sampler("b"))
    for future in futures:
        future.result(timeout=10)
    pair = ["forward_backward", "optim_step"]
    paths = [*pair, *pair, *pair, "save_weights", "forward_backward", "save_weights_for_sampler"]
    assert api.seq_ids() == list(zip(paths, range(1, 10), strict=True))


def test_calls_from_many_threads_get_distinct_numbers_without_gaps(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    def step() -> None:
        training.optim_step(ADAM).result(timeout=10)

    threads = [threading.Thread(target=step) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seq_id for _, seq_id in api.seq_ids()] == list(range(1, 17))


@pytest.mark.parametrize("trouble", [503, 500, 429, 408, DROP])
def test_a_retry_repeats_the_same_sequence_number(
    api: MockApi, training: tinker.TrainingClient, trouble: object
) -> None:
    api.script["forward_backward"] = [trouble, trouble]
    api.script["optim_step"] = [trouble]
    forward = training.forward_backward([datum()], "cross_entropy")
    training.optim_step(ADAM).result(timeout=10)
    assert forward.result(timeout=10).metrics["loss:sum"] == pytest.approx(1.0)
    assert [seq_id for _, seq_id in api.seq_ids()] == [1, 1, 1, 2, 2]


def test_a_refusal_is_raised_at_once_and_the_client_goes_on(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    api.script["optim_step"] = [422]
    with pytest.raises(tinker.UnprocessableEntityError, match="scripted 422") as caught:
        training.optim_step(ADAM).result(timeout=10)
    assert caught.value.status_code == 422
    assert caught.value.body == {"detail": "scripted 422"}
    training.optim_step(ADAM).result(timeout=10)
    assert [seq_id for _, seq_id in api.seq_ids()] == [1, 2]


@pytest.mark.parametrize(
    ("trouble", "error"), [(500, tinker.InternalServerError), (DROP, tinker.APIConnectionError)]
)
def test_retries_end(
    api: MockApi, training: tinker.TrainingClient, trouble: object, error: type[Exception]
) -> None:
    api.script["optim_step"] = [trouble] * 1000
    with pytest.raises(error):
        training.optim_step(ADAM).result(timeout=10)
    assert 3 < len(api.bodies("optim_step")) < 200


def test_an_answer_that_is_no_acknowledgement_is_reported(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    api.script["optim_step"] = [{"hello": 1}]
    with pytest.raises(tinker.APIResponseValidationError, match="optim_step"):
        training.optim_step(ADAM).result(timeout=10)


# ---- waiting


def test_pending_is_polled_again(api: MockApi, training: tinker.TrainingClient) -> None:
    again = {"type": "try_again", "request_id": "step 1", "queue_state": "active"}
    api.script["retrieve_future"] = [408, 408, again, 503, 429, DROP]
    assert training.optim_step(ADAM).result(timeout=10).metrics == {"unclipped_grad_l2:mean": 1.0}
    polls = [body["request_id"] for body in api.bodies("retrieve_future")]
    assert polls == ["create S:train:0"] + ["step 1"] * 7


def test_a_server_that_does_not_hold_its_polls_is_not_polled_hot(api: MockApi) -> None:
    with api.client(retry=RetryPolicy()) as service:
        training = service.create_lora_training_client("tiny").result(timeout=10)
        api.script["retrieve_future"] = [408] * 10**6
        before = len(api.requests)
        future = training.optim_step(ADAM)
        with pytest.raises(TimeoutError):
            future.result(timeout=1.0)
        assert len(api.requests) - before < 25
        wait_for("it is polled on", lambda: len(api.requests) - before > 3)


def test_a_timeout_ends_the_waiting_and_not_the_operation(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    api.script["retrieve_future"] = [408] * 10**6
    future = training.optim_step(ADAM)
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(timeout=0.01))
    api.script["retrieve_future"] = []
    assert future.result(timeout=10).metrics is not None


def test_a_server_that_stays_away_ends_the_waiting(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    api.script["retrieve_future"] = [DROP] * 1000
    started = time.monotonic()
    with pytest.raises(tinker.APIConnectionError):
        training.optim_step(ADAM).result(timeout=10)
    assert time.monotonic() - started >= FAST.give_up_s


def test_a_user_is_told_once_that_the_server_is_away_and_that_it_is_back(
    api: MockApi, training: tinker.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    api.script["retrieve_future"] = [DROP] * 5 + [408]
    training.optim_step(ADAM).result(timeout=10)
    away, back = (record.getMessage() for record in caplog.records)
    assert away.startswith("http")
    assert f"trying again for up to {FAST.give_up_s:.0f} s" in away
    assert re.search(r"answers again, after \d+ s", back)


@pytest.mark.parametrize("category", ["user", "server", "unknown", "something new"])
def test_a_failed_future_raises_with_its_category(
    api: MockApi, training: tinker.TrainingClient, category: str
) -> None:
    api.script["retrieve_future"] = [{"error": "too long", "category": category}]
    with pytest.raises(tinker.RequestFailedError, match="too long") as caught:
        training.optim_step(ADAM).result(timeout=10)
    assert caught.value.request_id == "step 1"
    expected = "unknown" if category == "something new" else category
    assert caught.value.category == expected
    training.optim_step(ADAM).result(timeout=10)


# ---- batches


def test_a_large_batch_is_cut_by_count_and_put_together_in_order(api: MockApi) -> None:
    api.config = {"fwdbwd_max_chunk_len": 2}
    with api.client() as service:
        training = service.create_lora_training_client("tiny").result(timeout=10)
        data = [datum(target) for target in range(1, 6)]
        output = training.forward_backward(data, "cross_entropy").result(timeout=10)
    assert [len(body.data) for body in api.bodies("forward_backward")] == [2, 2, 1]
    assert [seq_id for _, seq_id in api.seq_ids()] == [1, 2, 3]
    targets = [round(o["logprobs"].data[0] * -10) for o in output.loss_fn_outputs]
    assert targets == [1, 2, 3, 4, 5]
    assert output.metrics["loss:sum"] == pytest.approx(2 * (1 + 2 + 3 + 4 + 5) / 10)
    assert output.metrics["datums:mean"] == pytest.approx((2 * 2 + 2 * 2 + 1 * 1) / 5)


def test_a_large_batch_is_cut_by_bytes(api: MockApi) -> None:
    datum_bytes = 100 * (4 + 8 + 4)  # tokens int32, targets int64, weights float32
    api.config = {"fwdbwd_max_chunk_bytes_count": 2 * datum_bytes}
    with api.client() as service:
        training = service.create_lora_training_client("tiny").result(timeout=10)
        data = [datum(length=100), datum(length=100), datum(length=300), datum(length=100)]
        training.forward_backward(data, "cross_entropy").result(timeout=10)
    assert [len(body.data) for body in api.bodies("forward_backward")] == [2, 1, 1]


def test_the_default_is_1024_datums_to_a_request(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    training.forward([datum()] * 1025, "cross_entropy").result(timeout=10)
    assert [len(body.data) for body in api.bodies("forward_backward")] == [1024, 1]
    assert all(body.forward_only for body in api.bodies("forward_backward"))


def test_the_batch_arrives_unchanged(api: MockApi, training: tinker.TrainingClient) -> None:
    weights = np.array([[0.5, -1.5], [0, 2]], np.float32)
    two_chunks = tinker.Datum(
        model_input=tinker.ModelInput(
            chunks=[tinker.EncodedTextChunk(tokens=t) for t in ([1], [2])]
        ),
        loss_fn_inputs={"target_tokens": torch.tensor([[1, 2], [3, 4]]), "weights": weights},
    )
    config = {"clip_low_threshold": 0.8}
    training.forward_backward([two_chunks], "ppo", config).result(timeout=10)
    (body,) = api.bodies("forward_backward")
    assert [chunk.tolist() for chunk in body.data[0].chunks] == [[1], [2]]
    assert body.data[0].inputs["target_tokens"].tolist() == [[1, 2], [3, 4]]
    np.testing.assert_array_equal(body.data[0].inputs["weights"], weights)
    assert (body.loss_fn, body.loss_fn_config) == ("ppo", config)


def test_what_cannot_be_sent_is_refused_before_a_number_is_used(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    image = tinker.ImageChunk(data=b"x", format="png", expected_tokens=1)
    picture = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]))
    huge = tinker.Datum(model_input=tinker.ModelInput.from_ints([2**40]))
    for data, text in (([picture], "only text"), ([huge], "32 bits"), ([], "empty")):
        with pytest.raises(ValueError, match=text):
            training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM).result(timeout=10)
    assert api.seq_ids() == [("optim_step", 1)]


def test_optim_step_sends_all_six_parameters(api: MockApi, training: tinker.TrainingClient) -> None:
    training.optim_step(ADAM).result(timeout=10)
    training.optim_step(adam_params=ADAM).result(timeout=10)
    training.optim_step({"type": "dimuon", "learning_rate": 0.1}).result(timeout=10)
    first, second, third = api.bodies("optim_step")
    assert (
        first["adam_params"]
        == second["adam_params"]
        == {
            "learning_rate": 0.5,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        }
    )
    assert third["optimizer_params"] == {"type": "dimuon", "learning_rate": 0.1}
    assert "adam_params" not in third


# ---- custom losses


def test_a_custom_loss_sends_its_negative_gradient_as_weights(api: MockApi) -> None:
    api.config = {"fwdbwd_max_chunk_len": 1}

    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]):
        loss = sum((lp**2).sum() for lp in logprobs)
        return loss, {"mine": float(len(data))}

    with api.client() as service:
        training = service.create_lora_training_client("tiny").result(timeout=10)
        future = training.forward_backward_custom([datum(3), datum(7)], loss_fn)
        step = training.optim_step(ADAM)
        output = future.result(timeout=10)
        step.result(timeout=10)
    bodies = api.bodies("forward_backward")
    assert [body.forward_only for body in bodies] == [True, True, False, False]
    assert [body.data[0].inputs["weights"].tolist() for body in bodies[2:]] == [
        pytest.approx([0.6, 0.6]),
        pytest.approx([1.4, 1.4]),
    ]
    assert output.metrics["loss:sum"] == pytest.approx(2 * (0.09 + 0.49))
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(2 * (0.6 * 0.3 + 1.4 * 0.7))
    assert output.metrics["mine"] == 2.0
    assert api.seq_ids()[-1] == ("optim_step", 5)


def test_a_custom_loss_that_fails_leaves_the_client_usable(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        training.forward_backward_custom([datum()], loss_fn).result(timeout=10)
    training.optim_step(ADAM).result(timeout=10)
    assert api.seq_ids() == [("forward_backward", 1), ("optim_step", 2)]


def test_a_custom_loss_that_ignores_a_datum_is_refused(training: tinker.TrainingClient) -> None:
    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]):
        return logprobs[0].sum(), {}

    with pytest.raises(ValueError, match="datum 1"):
        training.forward_backward_custom([datum(), datum()], loss_fn).result(timeout=10)


# ---- checkpoints


def test_a_model_from_saved_state_is_addressed_by_session(
    api: MockApi, service: tinker.ServiceClient
) -> None:
    path = "tinker://R/weights/a"
    plain = service.create_training_client_from_state(path).result(timeout=10)
    exact = service.create_training_client_from_state_with_optimizer(path).result(timeout=10)
    assert [body["optimizer"] for body in api.bodies("load_weights")] == [False, True]
    assert not any("model_id" in body or "seq_id" in body for body in api.bodies("load_weights"))
    assert {plain.model_id, exact.model_id} == {"S:train:0", "S:train:1"}
    exact.optim_step(ADAM).result(timeout=10)
    assert api.seq_ids() == [("optim_step", 1)]


def test_saving_returns_the_path(api: MockApi, training: tinker.TrainingClient) -> None:
    saved = training.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result(timeout=10)
    assert saved.path == "tinker://S:train:0/weights/a"
    (body,) = api.bodies("save_weights")
    assert (body["ttl_seconds"], body["overwrite"]) == (3600, False)
    assert body["user_metadata"] == {"k": "v"}
    named = training.save_weights_for_sampler("b").result(timeout=10)
    assert named.path == "tinker://S:train:0/sampler_weights/b"


def test_samplers_share_one_counter_with_ephemeral_saves(
    api: MockApi, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    unnamed = training.save_weights_and_get_sampling_client().result(timeout=10)
    based = service.create_sampling_client(base_model="tiny").result(timeout=10)
    named = training.save_weights_and_get_sampling_client("n").result(timeout=10)
    ids = [client.sampling_session_id for client in (unnamed, based, named)]
    assert ids == ["S:sample:0", "S:sample:1", "S:sample:2"]
    assert named.get_base_model() == unnamed.get_base_model() == "tiny"
    created = api.bodies("create_sampling_session")[-1]
    assert created["model_path"] == "tinker://S:train:0/sampler_weights/n"


def test_a_sampler_needs_exactly_one_source(service: tinker.ServiceClient) -> None:
    with pytest.raises(ValueError, match="either"):
        service.create_sampling_client().result(timeout=10)


# ---- sampling


def test_a_sample_has_its_ids_tokens_and_logprobs(
    api: MockApi, sampler: tinker.SamplingClient
) -> None:
    sample = sampler.sample(PROMPT, 2, PARAMS, include_prompt_logprobs=True).result(timeout=10)
    assert [s.sequence_id for s in sample.sequences] == ["sample 0:0", "sample 0:1"]
    assert sample.sequences[1].tokens == [0, 2]
    assert sample.sequences[1].logprobs == [-0.5, -1.0]
    assert sample.prompt_logprobs == [None, pytest.approx(-0.2), pytest.approx(-0.3)]
    (body,) = api.bodies("asample")
    assert body["sampling_session_id"] == "S:sample:0"
    assert body["sampling_params"] == {
        "max_tokens": 2,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }


def test_compute_logprobs_is_one_token_with_prompt_logprobs(
    api: MockApi, sampler: tinker.SamplingClient
) -> None:
    logprobs = sampler.compute_logprobs(PROMPT).result(timeout=10)
    assert logprobs == [None, pytest.approx(-0.2), pytest.approx(-0.3)]
    assert api.bodies("asample")[0]["sampling_params"]["max_tokens"] == 1


def test_backpressure_repeats_the_number_for_longer_than_a_failure_would(
    api: MockApi, sampler: tinker.SamplingClient
) -> None:
    api.script["asample"] = [429] * 60
    started = time.monotonic()
    sampler.sample(PROMPT, 1, PARAMS).result(timeout=20)
    assert time.monotonic() - started > FAST.give_up_s
    assert {body["seq_id"] for body in api.bodies("asample")} == {0}
    assert len(api.bodies("asample")) == 61


def test_a_lost_sample_is_resubmitted_under_a_new_number(
    api: MockApi, sampler: tinker.SamplingClient
) -> None:
    api.script["retrieve_future"] = [410]
    sample = sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert [body["seq_id"] for body in api.bodies("asample")] == [0, 1]
    assert sample.sequences[0].sequence_id == "sample 1:0"


def test_samples_that_are_lost_every_time_are_given_up(
    api: MockApi, sampler: tinker.SamplingClient
) -> None:
    api.script["retrieve_future"] = [410] * 100
    with pytest.raises(tinker.APIStatusError) as caught:
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert caught.value.status_code == 410
    assert len(api.bodies("asample")) == 6


def test_fewer_samples_than_acknowledged_are_an_error(
    api: MockApi, sampler: tinker.SamplingClient
) -> None:
    sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    api.script["asample"] = [{"request_id": "sample 0", "sample_sequence_ids": ["a", "b"]}]
    with pytest.raises(
        tinker.APIResponseValidationError, match="2 samples were acknowledged, 1 returned"
    ):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)


# ---- the session's life


def test_closing_finishes_the_session_once(api: MockApi) -> None:
    client = api.client()
    training = client.create_lora_training_client("tiny").result(timeout=10)
    client.close()
    client.close()
    assert api.bodies("sessions/S/finish") == [{"reason": {"type": "success"}, "detail": None}]
    with pytest.raises(RuntimeError, match="closed"):
        training.optim_step(ADAM)


def test_an_error_inside_the_context_finishes_the_session_as_errored(api: MockApi) -> None:
    with pytest.raises(ZeroDivisionError), api.client() as client:
        client.create_lora_training_client("tiny").result(timeout=10)
        raise ZeroDivisionError("mine")
    (body,) = api.bodies("sessions/S/finish")
    assert body == {"reason": {"type": "errored"}, "detail": "ZeroDivisionError: mine"}


def test_closing_cancels_pending_calls(api: MockApi) -> None:
    client = api.client()
    training = client.create_lora_training_client("tiny").result(timeout=10)
    api.script["retrieve_future"] = [408] * 10**6
    future = training.optim_step(ADAM)
    client.close()
    assert future.future().cancelled()


def test_closing_ends_a_call_that_is_being_posted(api: MockApi) -> None:
    client = api.client()
    training = client.create_lora_training_client("tiny").result(timeout=10)
    api.script["optim_step"] = [503] * 10**6
    future = training.optim_step(ADAM)
    wait_for("it is posted", lambda: api.bodies("optim_step"), poll_s=0.001)
    client.close()
    assert future.done()
    with pytest.raises(CancelledError):
        future.result(timeout=10)


def test_a_cancelled_call_that_was_not_posted_is_never_posted(api: MockApi) -> None:
    patient = replace(FAST, give_up_s=60.0)
    with api.client(retry=patient) as service:
        training = service.create_lora_training_client("tiny", rank=8).result(timeout=10)
        api.script["forward_backward"] = [503] * 10**6  # until the call behind it is cancelled
        first = training.forward_backward([datum()], "cross_entropy")
        second = training.optim_step(ADAM)
        third = training.save_state("a")
        wait_for("it is posted", lambda: api.bodies("forward_backward"), poll_s=0.001)
        assert second.future().cancel()
        api.script["forward_backward"] = []
        third.result(timeout=10)
        first.result(timeout=10)
    *attempts, last = api.seq_ids()
    assert set(attempts) == {("forward_backward", 1)}
    assert last == ("save_weights", 2)


def test_a_cancelled_call_that_was_posted_leaves_the_lane_in_order(
    api: MockApi, training: tinker.TrainingClient
) -> None:
    api.script["retrieve_future"] = [408] * 5
    first = training.optim_step(ADAM)
    wait_for("it is posted", lambda: api.bodies("optim_step"), poll_s=0.001)
    first.future().cancel()
    training.optim_step(ADAM).result(timeout=10)
    assert api.seq_ids() == [("optim_step", 1), ("optim_step", 2)]


def test_the_heartbeat_survives_trouble_and_stops_when_the_session_is_gone(
    api: MockApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_PERIOD_S", 0.01)
    api.script["session_heartbeat"] = [404, DROP, {"type": "session_heartbeat"}, 410]
    with api.client() as client:
        client.create_lora_training_client("tiny").result(timeout=10)
        wait_for(
            "four heartbeats come",
            lambda: len(api.bodies("session_heartbeat")),
            lambda number: number >= 4,
        )
        time.sleep(0.1)
    assert len(api.bodies("session_heartbeat")) == 4


def test_console_urls_lead_to_the_server_of_the_client() -> None:
    with MockApi().client() as service:
        assert service.get_console_url().endswith("/sessions")
        training = service.create_lora_training_client("tiny").result(timeout=10)
        assert training.get_console_url().endswith(f"/training_runs/{training.model_id}")
        session_id = training.model_id.partition(":")[0]
        assert service.get_console_url().endswith(f"/sessions/{session_id}")
        assert "thinkingmachines" not in service.get_console_url()
