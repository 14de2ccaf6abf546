"""Our client against the forms of the hosted service, which the official one sends too."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker as official
import zstandard

import tinker_gmi as tinker
from tests.mock_api import FAST
from tests.tinker_gmi import hosted_api
from tests.tinker_gmi.hosted_api import API_KEY, HostedApi, served, token
from tinker_gmi.connection import credentials as credentials_module
from tinker_gmi.connection.credentials import Credentials
from tinker_gmi.connection.retries import RetryPolicy
from tinker_gmi.connection.zstd import stored_frame

QUICK = RetryPolicy(first_delay_s=0.01, max_delay_s=0.05, give_up_s=2.0, billing_pause_s=0.02)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> HostedApi:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return HostedApi()


@pytest.fixture
def address(api: HostedApi) -> Iterator[str]:
    with served(api) as base_url:
        yield base_url


@pytest.fixture
def service(address: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=address, api_key=API_KEY, retry=QUICK) as client:
        yield client


def step_and_sample(client: Any, library: Any) -> list[int]:
    """One pipelined step, and a sample from its weights."""
    prompt = library.ModelInput.from_ints([1, 2, 3])
    inputs = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    datum = library.Datum(model_input=prompt, loss_fn_inputs=inputs)
    loss = client.forward_backward([datum], "cross_entropy")
    step = client.optim_step(library.AdamParams())
    assert loss.result(timeout=30).metrics["loss:sum"] == pytest.approx(0.9)
    assert step.result(timeout=30).metrics == {"unclipped_grad_l2:mean": 1.0}
    sampler = client.save_weights_and_get_sampling_client().result(timeout=30)
    params = library.SamplingParams(max_tokens=2)
    futures = [sampler.sample(prompt, 2, params) for _ in range(3)]
    samples = [future.result(timeout=30) for future in futures]
    assert len({each.sequence_id for sample in samples for each in sample.sequences}) == 6
    return sorted(int(sample.sequences[0].tokens[0]) for sample in samples)


@pytest.mark.parametrize("library", [official, tinker], ids=["tinker", "tinker_gmi"])
def test_a_step_and_samples_in_the_hosted_forms(api: HostedApi, address: str, library: Any) -> None:
    service = library.ServiceClient(base_url=address, api_key=API_KEY)
    client = service.create_lora_training_client("tiny", rank=8).result()
    assert step_and_sample(client, library) == [0, 1, 2]
    closing = service.close("success")
    if closing is not None:
        closing.result()
    assert api.broken == []
    assert API_KEY in api.exchanges


def test_results_that_arrived_are_reported_so_that_the_service_may_forget_them(
    api: HostedApi, service: tinker.ServiceClient
) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=30)
    prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=2)
    for _ in range(3):
        sampler.sample(prompt, 1, params).result(timeout=30)
    assert {"sample 0", "sample 1"} <= api.fetched


def test_a_rejected_token_is_replaced_and_the_request_sent_again(
    api: HostedApi, service: tinker.ServiceClient
) -> None:
    client = service.create_lora_training_client("tiny").result(timeout=30)
    api.reject_token()
    assert step_and_sample(client, tinker) == [0, 1, 2]
    assert len(api.exchanges) == 2
    assert len([path for path, _ in api.requests if path == "optim_step"]) == 1


def test_a_rest_client_exchanges_its_key_too(api: HostedApi, address: str) -> None:
    with tinker.RestClient(base_url=address, api_key=API_KEY, retry=QUICK) as rest:
        assert rest.get_server_capabilities().result(timeout=30).supported_models
        assert rest.whoami().result(timeout=30).email == "ann@example.org"
    assert api.broken == []


def test_a_key_that_the_service_does_not_know_is_said_at_once(api: HostedApi, address: str) -> None:
    service = tinker.ServiceClient(base_url=address, api_key="tml-other", retry=QUICK)
    with service, pytest.raises(tinker.AuthenticationError, match="no such credential"):
        service.create_lora_training_client("tiny").result(timeout=30)
    assert api.exchanges == ["tml-other"]


def test_the_credential_of_an_organization_comes_from_its_command(
    api: HostedApi, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.config["credential_default_source"] = "credential_cmd"
    api.credential = "short-lived"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo short-lived")
    with tinker.ServiceClient(base_url=address, api_key=API_KEY, retry=QUICK) as service:
        service.create_lora_training_client("tiny").result(timeout=30)
    assert api.exchanges == ["short-lived"]


def test_want_of_money_pauses_a_job_and_does_not_end_it(
    api: HostedApi, service: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = service.create_lora_training_client("tiny").result(timeout=30)
    api.script["forward_backward"] = [402, 402]
    api.script["retrieve_future"] = [402]
    api.script["asample"] = [402]
    assert step_and_sample(client, tinker) == [0, 1, 2]
    assert "402" in caplog.text


def test_want_of_money_at_the_start_is_an_error(
    api: HostedApi, service: tinker.ServiceClient
) -> None:
    api.script["create_model"] = [402]
    with pytest.raises(tinker.BillingError):
        service.create_lora_training_client("tiny").result(timeout=30)


def test_a_pause_ends_after_the_time_that_the_service_sets(api: HostedApi, address: str) -> None:
    api.config["billing_exception_max_pause_duration_sec"] = 0
    with tinker.ServiceClient(base_url=address, api_key=API_KEY, retry=QUICK) as service:
        client = service.create_lora_training_client("tiny").result(timeout=30)
        api.script["optim_step"] = [402] * 100
        with pytest.raises(tinker.BillingError):
            client.optim_step(tinker.AdamParams()).result(timeout=30)


def test_clones_ask_for_the_numbers_of_their_samples(
    api: HostedApi, service: tinker.ServiceClient, address: str
) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=30)
    handle = sampler.get_sampler_handle()
    with tinker.SamplingClient.from_sampler_handle(handle, api_key=API_KEY) as clone:
        prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=2)
        sample = clone.compute_logprobs(prompt).result(timeout=30)
        assert sample == pytest.approx([None, -0.2])
        clone.compute_logprobs(prompt).result(timeout=30)
    assert params.max_tokens == 2
    assert [body["seq_id"] for body in api.bodies("asample")] == [3_000_000_000, 3_000_000_001]
    assert len(api.bodies("create_session")) == 1


# ---- parts


@pytest.mark.parametrize("length", [0, 1, 128 * 1024, 128 * 1024 + 1, 400_000])
def test_a_frame_of_stored_blocks_is_one_that_zstd_reads(length: int) -> None:
    body = bytes(i % 251 for i in range(length))
    assert zstandard.ZstdDecompressor().decompress(stored_frame(body)) == body


async def test_a_token_is_renewed_at_half_of_its_life_and_kept_where_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of the test's own: a busy machine is late."""
    clock = SimpleNamespace(now_s=1e9)
    clock.time = clock.monotonic = lambda: clock.now_s
    for module in (credentials_module, hosted_api):
        monkeypatch.setattr(module, "time", clock)
    tokens: list[str] = []
    fails = False

    async def exchange(_: str | None) -> str:
        if fails:
            raise tinker.APIConnectionError("away")
        tokens.append(token(len(tokens), lifetime_s=40.0))
        return tokens[-1]

    credentials = Credentials("key")
    assert await credentials.current() == "key"
    credentials.use_tokens(exchange, None)
    assert await credentials.current() == await credentials.current() == tokens[0]
    clock.now_s += 25
    assert await credentials.current() == tokens[1]
    fails = True
    clock.now_s += 25
    assert await credentials.current() == tokens[1]
    clock.now_s += 25
    with pytest.raises(tinker.APIConnectionError):
        await credentials.current()


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [({"retry-after": "1"}, 1.0), ({"retry-after-ms": "300"}, 0.3), ({"retry-after": "7200"}, 0.0)],
)
def test_a_server_may_ask_for_a_wait_of_at_most_a_minute(
    headers: dict[str, str], wait_s: float
) -> None:
    seen: list[float] = []

    def answer(_: httpx.Request) -> httpx.Response:
        seen.append(time.monotonic())
        if len(seen) == 2:
            return httpx.Response(429, headers=headers, json={"detail": "slow"})
        return httpx.Response(200, json={"supported_models": []})

    transport = httpx.MockTransport(answer)
    with tinker.ServiceClient(http_transport=transport, base_url="http://x", retry=FAST) as client:
        client.get_server_capabilities()
    # a busy machine may be late, by less than the minute that no answer may ask for
    assert wait_s <= seen[2] - seen[1] < wait_s + 30
