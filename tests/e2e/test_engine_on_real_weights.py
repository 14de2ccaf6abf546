"""What only shows with real weights: bfloat16, response times under load, an engine that dies."""

import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.clients import MODEL, Client, logprobs_of
from tests.peak_memory import resident_bytes
from tests.serving import Server, start_server
from tinkercloud.embedded.model import freed_memory

TEXT = (
    "A lighthouse keeper writes down the weather every morning: wind from the west, rain before "
    "noon, and one ship that never answers the lamp."
)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> list[int]:
    return tokenizer.encode(TEXT)


@contextmanager
def serving(gguf: Path, dtype: str, folder: Path) -> Iterator[Server]:
    # Small micro-batches: samples are served between them.
    arguments = (
        "--model",
        f"{MODEL}={gguf}",
        "--dtype",
        dtype,
        "--engine-microbatch-tokens",
        "256",
    )
    with start_server(*arguments, data_dir=folder / "data") as server:
        yield server


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(smollm2_gguf, "float32", tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """One for each test: two of them end the engine or the server."""
    client = Client.connect(tinker, server)
    yield client
    client.close()


def test_the_sampler_is_closer_to_float64_than_a_float32_pass_of_torch(
    client: Client, smollm2_folder: Path
) -> None:
    """Largest |d| of log-probabilities over 200 random tokens, which are hard on rounding."""
    tokens = np.random.default_rng(0).integers(0, 40_000, 200).tolist()
    distance = {}
    exact = np.zeros(0)
    for dtype in (torch.float64, torch.float32):
        network = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=dtype).eval()
        with torch.no_grad():
            law = torch.log_softmax(network(torch.tensor([tokens])).logits[0].double(), -1)
        theirs = law[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        exact = theirs if dtype == torch.float64 else exact
        distance[dtype] = np.abs(theirs - exact).max()
    sampler = client.base_sampler()
    sampled = np.array(sampler.compute_logprobs(client.prompt(tokens)).result()[1:])
    assert np.abs(sampled - exact).max() < max(2e-4, distance[torch.float32])


def test_in_bfloat16_trainer_and_sampler_are_equal_and_near_transformers(
    text: list[int], smollm2_gguf: Path, smollm2_folder: Path, tmp_path: Path
) -> None:
    """Log-probabilities with a fresh adapter; the mean distance from transformers in float32. (In
    float32: test_first_light.py.)"""
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        law = torch.log_softmax(reference(torch.tensor([text])).logits[0].double(), -1)
    theirs = law[:-1].gather(-1, torch.tensor(text[1:])[:, None])[:, 0].numpy()
    with serving(smollm2_gguf, "bfloat16", tmp_path) as server:
        client = Client.connect(tinker, server)
        model = client.model()
        trained = logprobs_of(model.forward([client.supervised(text)], "cross_entropy").result())
        sampler = model.save_weights_and_get_sampling_client().result()
        sampled = np.array(sampler.compute_logprobs(client.prompt(text)).result()[1:])
        client.close()
    assert np.array_equal(trained, sampled)
    assert np.abs(sampled - theirs).mean() < 3e-2


def test_the_api_answers_in_milliseconds_while_the_engine_computes(
    client: Client, server: Server, text: list[int]
) -> None:
    model = client.model()
    with server.http() as http:

        def median_ms() -> float:
            times_ms = []
            for _ in range(60):
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                times_ms.append(1000 * (time.monotonic() - began))
                time.sleep(0.01)
            return float(np.median(times_ms))

        median_ms()
        alone_ms = median_ms()  # more than a few where the machine is busy with something else
        training = model.forward_backward([client.supervised(text)] * 40, "cross_entropy")
        beside_ms = median_ms()
    assert beside_ms < max(20, 5 * alone_ms), (alone_ms, beside_ms)
    training.result()


def test_samples_are_served_while_a_model_trains(
    client: Client, server: Server, text: list[int]
) -> None:
    model, sampler = client.model(), client.base_sampler()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            model.forward_backward([client.supervised(text * 4)] * 16, "cross_entropy").result
        )
        answered = 0
        while not training.done():
            client.sample(sampler, text[:8], max_tokens=2)
            answered += 1
        assert math.isfinite(training.result().metrics["loss:sum"])
    assert answered >= 3


@pytest.mark.skipif(freed_memory._trim is None, reason="this C library gives nothing back")
def test_an_idle_engine_gives_back_what_training_has_freed(
    client: Client, server: Server, text: list[int]
) -> None:
    """But for adapters, gradients and moments, and what is asked for once."""
    model = client.model()

    def engine_bytes() -> float:
        return resident_bytes("VmRSS", server.engine_pid())

    most = before = engine_bytes()
    batch = [client.supervised(text * 16)] * 4
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(lambda: model.forward_backward(batch, "cross_entropy").result())
        while not training.done():
            most = max(most, engine_bytes())
            time.sleep(0.02)
        training.result()
    deadline = time.monotonic() + 20
    while engine_bytes() - before > (most - before) / 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert most - before > 150e6
    assert engine_bytes() - before < (most - before) / 2


def test_what_is_underway_when_the_engine_dies_goes_on_when_it_is_back(
    client: Client, server: Server, text: list[int]
) -> None:
    model, other = client.model(), client.model()
    sampler = client.base_sampler()
    batch = [client.supervised(text * 4)] * 20
    undisturbed = client.sample(sampler, text[:8], n=4, max_tokens=100, seed=1, temperature=1.0)
    trained = logprobs_of(other.forward_backward(batch, "cross_entropy").result())
    sampling = sampler.sample(
        prompt=client.prompt(text[:8]),
        num_samples=4,
        sampling_params=client.params(max_tokens=100, seed=1, temperature=1.0),
    )
    training = model.forward_backward(batch, "cross_entropy")
    os.kill(server.engine_pid(), signal.SIGKILL)
    again = sampling.result().sequences
    assert [s.tokens for s in again] == [s.tokens for s in undisturbed]
    assert [s.logprobs for s in again] == [s.logprobs for s in undisturbed]
    assert np.array_equal(logprobs_of(training.result()), trained)
    norm = model.optim_step(client.adam()).result().metrics["unclipped_grad_l2:mean"]
    assert norm == other.optim_step(client.adam()).result().metrics["unclipped_grad_l2:mean"]
