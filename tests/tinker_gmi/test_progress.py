"""What a client tells of its requests, and how it tries samples again."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinker_gmi as tinker
from tests import serving
from tests.api.models.test_queue_state import REASON, FullBackend
from tests.api.thread_server import MODEL, thread_server
from tests.mock_api import DROP, MockApi
from tinkercloud.config import Config

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
PARAMS = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
DATUM = tinker.Datum.model_validate(
    {"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [1.0] * 3}}
)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[FullBackend, str, str]]:
    """A backend without room, and the address and key of its server."""
    backend = FullBackend(Config(backend="fake"))
    with thread_server(tmp_path, backend, hold_s=0.05) as (base_url, key):
        yield backend, base_url, key


def make_room(backend: FullBackend) -> None:
    backend.room._loop.call_soon_threadsafe(backend.room.set)  # type: ignore[union-attr]


def test_a_request_is_told_of_from_its_acceptance_to_its_end(
    full: tuple[FullBackend, str, str],
) -> None:
    backend, base_url, key = full
    seen: list[tinker.Progress] = []

    def note(progress: tinker.Progress) -> None:
        seen.append(progress)
        if progress.state == "paused":
            make_room(backend)
        raise RuntimeError("what a callback raises ends nothing")

    with tinker.ServiceClient(base_url=base_url, api_key=key, on_progress=note) as service:
        client = service.create_lora_training_client(MODEL, rank=4).result(timeout=30)
        client.forward_backward([DATUM], "cross_entropy").result(timeout=30)
        with pytest.raises(tinker.RequestFailedError):
            client.forward_backward([DATUM], "nonsense").result(timeout=30)
    by_type = [(each.work.type, each.state) for each in seen if each.state != "waiting"]
    assert next(state for kind, state in by_type if kind == "CreateModel") == "accepted"
    assert ("CreateModel", "paused") in by_type
    assert by_type[-4:] == [
        ("ForwardBackward", state) for state in ("accepted", "done", "accepted", "failed")
    ]
    paused = next(each for each in seen if each.state == "paused")
    assert paused.reason == REASON
    assert paused.work.subject == client.model_id
    assert 0 < paused.elapsed_s < 30
    assert seen[-1].reason is not None
    assert "nonsense" in seen[-1].reason


def test_a_sampler_hears_of_the_queue_and_warns_once_a_minute(
    full: tuple[FullBackend, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    backend, base_url, key = full
    heard: list[tuple[str, str | None]] = []

    class Listener(tinker.SamplingClient):
        def on_queue_state_change(
            self, queue_state: tinker.types.QueueState, queue_state_reason: str | None
        ) -> None:
            super().on_queue_state_change(queue_state, queue_state_reason)
            heard.append((queue_state, queue_state_reason))
            if len(heard) == 3:
                make_room(backend)

    with tinker.ServiceClient(base_url=base_url, api_key=key) as service:
        client = service.create_sampling_client(base_model=MODEL).result(timeout=30)
        client.__class__ = Listener
        client.sample(PROMPT, 1, PARAMS).result(timeout=30)
    assert heard[:3] == [("paused_capacity", REASON)] * 3
    warnings = [record for record in caplog.records if REASON in record.getMessage()]
    assert len(warnings) == 1


def test_a_pickled_client_samples_in_another_process(fake_server: serving.Server) -> None:
    address = {"base_url": fake_server.base_url, "api_key": fake_server.api_key}
    with tinker.ServiceClient(**address) as service:
        client = service.create_sampling_client(base_model=MODEL).result(timeout=30)
        expected = client.sample(PROMPT, 1, PARAMS).result(timeout=30).sequences[0].tokens
        code = """
import pickle, sys, tinker_gmi as tinker
client = pickle.load(sys.stdin.buffer)
prompt = tinker.ModelInput.from_ints([1, 2, 3])
params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
with client:
    print(client.sample(prompt, 1, params).result(timeout=30).sequences[0].tokens)
"""
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=serving.ROOT,
            env={**serving.QUIET, "TINKER_API_KEY": fake_server.api_key},
            input=pickle.dumps(client),
            capture_output=True,
            timeout=300,
            check=True,
        )
        assert run.stdout.decode().strip() == str(expected)
        # the clone has ended, and the session has not
        client.sample(PROMPT, 1, PARAMS).result(timeout=30)


def test_a_text_that_is_no_handle_is_refused() -> None:
    with pytest.raises(ValueError, match="no handle"):
        tinker.SamplingClient.from_sampler_handle("e30=")


# ---- retries of samples, where the server answers as it is told to


def sampler(api: MockApi, config: Any) -> tinker.SamplingClient:
    service = api.client()
    return service.create_sampling_client(base_model="tiny", retry_config=config).result(timeout=10)


QUICK = {"retry_delay_base": 0.01, "retry_delay_max": 0.02}


def test_with_a_retry_config_samples_outlive_the_transports_patience() -> None:
    api = MockApi()
    client = sampler(api, tinker.RetryConfig(**QUICK))
    client.sample(PROMPT, 1, PARAMS).result(timeout=10)
    api.script["asample"] = [DROP] * 60  # more than the half second of the transport
    assert client.sample(PROMPT, 1, PARAMS).result(timeout=30).sequences
    seq_ids = [body["seq_id"] for body in api.bodies("asample")]
    assert seq_ids[-1] > 1  # a retry is a new request
    client._session.close("success", None)


def test_without_retry_logic_the_first_failure_is_raised() -> None:
    api = MockApi()
    client = sampler(api, tinker.RetryConfig(enable_retry_logic=False))
    api.script["asample"] = [DROP] * 200
    with pytest.raises(tinker.APIConnectionError):
        client.sample(PROMPT, 1, PARAMS).result(timeout=30)
    client._session.close("success", None)


def test_samples_that_make_no_progress_fail_as_stuck() -> None:
    api = MockApi()
    client = sampler(api, tinker.RetryConfig(progress_timeout=0.3))
    pending = {"type": "try_again", "request_id": "any", "queue_state": "active"}
    api.script["retrieve_future"] = [pending] * 10_000
    with pytest.raises(tinker.APIConnectionError, match="stuck"):
        client.sample(PROMPT, 1, PARAMS).result(timeout=30)
    client._session.close("success", None)


@pytest.mark.parametrize(
    ("field", "value"), [("progress_timeout", 0.0), ("max_connections", 0), ("jitter_factor", 2.0)]
)
def test_a_retry_config_that_cannot_work_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        tinker.RetryConfig(**{field: value})  # type: ignore[arg-type]
