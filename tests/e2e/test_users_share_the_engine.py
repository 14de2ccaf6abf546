"""Two users of one server on real weights, with its own defaults: neither can hold the other up."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.clients import MODEL
from tests.serving import Server
from tests.waiting import wait_for
from tinkercloud.storage.keys import KeyStore

logger = logging.getLogger(__name__)

VOCAB = 40_000
LONG, SHORT, NEW = 8000, 24, 16  # tokens of prompts, and of a short sample
SAMPLES_AT_ONCE = 100  # of one request


def new_key(server: Server, user: str, **rights: Any) -> dict[str, str]:
    """The header that requests with it have."""
    with closing(KeyStore(server.data_dir)) as keys:
        return {"X-API-Key": keys.add(user, **rights)}


class User:
    """A key of the server, and a session of it."""

    def __init__(self, server: Server, name: str):
        headers = new_key(server, name)
        base_url = f"{server.base_url}/api/v1/"
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=300, trust_env=False)
        self._rng = np.random.default_rng(0)
        self.session = self.post("create_session", tags=[])["session_id"]
        number = {"session_id": self.session, "sampling_session_seq_id": 0}
        created = self.post("create_sampling_session", **number, base_model=MODEL)
        self._sampler = created["sampling_session_id"]

    def close(self) -> None:
        self.finish()
        self._http.close()

    def finish(self) -> None:
        self.post(f"sessions/{self.session}/finish", reason={"type": "success"}, detail=None)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def tokens(self, length: int) -> list[int]:
        return self._rng.integers(10, VOCAB, length).tolist()

    def sample(self, prompt: list[int], num_samples: int = 1, max_tokens: int = NEW) -> str:
        body = {
            "sampling_session_id": self._sampler,
            "num_samples": num_samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "seed": 1},
        }
        return self.post("asample", **body)["request_id"]

    def status(self, request_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        return self._http.get(f"retrieve_future/{request_id}", params={"wait_s": wait_s}).json()

    def result(self, request_id: str) -> dict[str, Any]:
        while (status := self.status(request_id, 20.0))["status"] == "pending":
            pass
        assert status["status"] == "completed", status
        return status["result"]

    def short_samples(self, prompts: list[list[int]]) -> tuple[float, list[Any]]:
        """The median of their times, one after the other, and what they are."""
        times_s, samples = [], []
        for prompt in prompts:
            began = time.monotonic()
            samples.append(self.result(self.sample(prompt))["sequences"])
            times_s.append(time.monotonic() - began)
        return float(np.median(times_s)), samples


@pytest.fixture
def ann(server: Server) -> Iterator[User]:
    user = User(server, "ann")
    yield user
    user.close()


@pytest.fixture
def bob(server: Server) -> Iterator[User]:
    user = User(server, "bob")
    yield user
    user.close()


class Operator:
    """An administrator's key."""

    def __init__(self, server: Server):
        self._http = server.http()
        self._http.headers.update(new_key(server, "eve", role="admin"))

    def gauge(self, name: str) -> int:
        """The engine says about once a second how many samples it has."""
        return self._http.get("/health").json()["backend"][f"sampling_{name}"]

    def num_samples(self) -> int:
        return self.gauge("running") + self.gauge("waiting")

    def wait_until_busy(self) -> None:
        wait_for("the engine has samples", self.num_samples, poll_s=0.1)

    def wait_until_idle(self) -> None:
        wait_for("it has none", self.num_samples, lambda n: n == 0, poll_s=0.1)

    def num_tokens(self) -> int:
        """That the engine has sampled."""
        return self._http.get("/health").json()["backend"]["tokens_sampled"]

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def eve(server: Server) -> Iterator[Operator]:
    operator = Operator(server)
    yield operator
    operator.close()


def test_prompts_of_8000_tokens_slow_anothers_short_samples_by_two_at_most(
    eve: Operator, ann: User, bob: User
) -> None:
    prompts = [bob.tokens(SHORT) for _ in range(9)]
    bob.short_samples(prompts[:2])
    alone_s, before = bob.short_samples(prompts)
    long = [ann.sample(ann.tokens(LONG), max_tokens=1) for _ in range(6)]
    time.sleep(1.0)
    beside_s, meanwhile = bob.short_samples(prompts)
    last = ann.status(long[-1])["status"]
    ann.finish()
    eve.wait_until_idle()
    again_s, _ = bob.short_samples(prompts)
    alone_s = max(alone_s, again_s)  # the machine may have become slower meanwhile
    figures = f"a short sample takes {alone_s:.3f} s alone, {beside_s:.3f} s beside long prompts"
    logger.info("%s", figures)
    assert last == "pending", "the prompts were over too soon"
    assert meanwhile == before, "company changes no bit"
    assert beside_s <= 2.0 * alone_s + 0.1, figures


def test_who_cancels_or_leaves_costs_nothing_any_more(eve: Operator, ann: User) -> None:
    """What was cancelled is not computed to its end."""
    before = eve.num_tokens()
    cancelled = ann.sample(ann.tokens(LONG), max_tokens=100)
    eve.wait_until_busy()
    ann.post("cancel_future", request_id=cancelled)
    eve.wait_until_idle()
    between = eve.num_tokens()
    assert between - before < 100
    for _ in range(4):
        ann.sample(ann.tokens(LONG), max_tokens=100)
    ann.sample(ann.tokens(SHORT), num_samples=SAMPLES_AT_ONCE, max_tokens=4000)
    eve.wait_until_busy()
    ann.finish()
    eve.wait_until_idle()
    assert eve.num_tokens() - between < SAMPLES_AT_ONCE * 4000 / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_samples", "num_calls"),
    [(SAMPLES_AT_ONCE, 12), (1, 25)],
)
def test_ten_thousand_queued_samples_do_not_delay_anothers_training(
    eve: Operator, ann: User, bob: User, num_samples: int, num_calls: int
) -> None:
    """num_samples: of each request. num_calls: of forward_backward, alone and beside them.

    Sampling and training share the engine's time, so training takes twice as long, and a call
    waits for the step that is underway; first come, first served it would wait for half an hour."""
    body = {"session_id": bob.session, "model_seq_id": 0, "base_model": MODEL}
    created = bob.post("create_model", **body, lora_config={"rank": 8, "seed": 1})
    bob.result(created["request_id"])
    numbers = count(1)

    def times_s() -> tuple[float, float]:
        """The median and the 99th percentile."""
        times_s = []
        for _ in range(num_calls):
            began = time.monotonic()
            bob.result(forward_backward(bob, created["model_id"], next(numbers)))
            times_s.append(time.monotonic() - began)
        return float(np.median(times_s)), float(np.quantile(times_s, 0.99))

    bob.result(forward_backward(bob, created["model_id"], next(numbers)))
    alone = times_s()
    num_requests = 10_000 // num_samples
    for _ in range(num_requests):
        ann.sample(ann.tokens(SHORT), num_samples=num_samples, max_tokens=200)
    beside = times_s()
    left = eve.gauge("waiting")
    figures = (
        f"forward_backward, median and p99: {alone[0]:.3f} and {alone[1]:.3f} s alone, "
        f"{beside[0]:.3f} and {beside[1]:.3f} s beside {left} requests of {num_samples} samples"
    )
    logger.info("%s", figures)
    assert left > 0.8 * num_requests, "the samples were over too soon"
    assert beside[1] <= 5.0 * alone[1] + 0.5, figures


def forward_backward(user: User, model_id: str, seq_id: int) -> str:
    tokens = user.tokens(129)
    weights = {"data": [1.0] * 128, "dtype": "float32", "shape": [128]}
    targets = {"data": tokens[1:], "dtype": "int64", "shape": [128]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {"target_tokens": targets, "weights": weights},
    }
    batch = {"data": [datum], "loss_fn": "cross_entropy"}
    accepted = user.post(
        "forward_backward", model_id=model_id, seq_id=seq_id, forward_backward_input=batch
    )
    return accepted["request_id"]
