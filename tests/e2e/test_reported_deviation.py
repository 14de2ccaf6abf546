"""Where equal log-probabilities are not promised, the server reports how far apart they are."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker

from tests.e2e.clients import MODEL, Client, logprobs_of, on_policy_gauges
from tests.embedded.tiny import random_prompt, write_tiny_model
from tests.serving import Server, start_server

NUM_SAMPLES, NUM_TOKENS = 6, 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without compiled kernels, in bfloat16."""
    root = tmp_path_factory.mktemp("server")
    model = write_tiny_model(root / "tiny")
    environment = {"CC": "/does/not/exist/cc", "XDG_CACHE_HOME": str(root / "cache")}
    served = ("--model", f"{MODEL}={model}", "--dtype", "bfloat16")
    with start_server(*served, data_dir=root / "data", environment=environment) as server:
        yield server


def test_without_compiled_kernels_the_metrics_are_what_the_client_finds(server: Server) -> None:
    client, prompt = Client.connect(tinker, server), random_prompt(70, 0)
    model = client.model()
    client.train(model, [client.supervised(random_prompt(40, 1))], 1e-2)
    sampler = model.save_weights_and_get_sampling_client().result()
    params = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "stop": []}
    samples = client.sample(sampler, prompt, n=NUM_SAMPLES, seed=1, **params)
    held, data = len(prompt) - 1, []
    for sample in samples:
        tokens = [*prompt, *sample.tokens]
        data.append(
            client.datum(
                tokens[:-1],
                target_tokens=tokens[1:],
                logprobs=[0.0] * held + list(sample.logprobs),
                advantages=[0.0] * held + [1.0] * NUM_TOKENS,
            )
        )
    training = model.forward_backward(data, "importance_sampling")
    stepping = model.optim_step(client.adam())
    trained = [logprobs_of(training.result(), i)[held:] for i in range(NUM_SAMPLES)]
    metrics = stepping.result().metrics
    client.close()
    apart = np.array(trained, np.float64) - np.array([sample.logprobs for sample in samples])
    largest = np.abs(np.expm1(apart)).max()
    assert metrics["on_policy_tokens:sum"] == NUM_SAMPLES * NUM_TOKENS
    assert metrics["on_policy_ratio_deviation:max"] == pytest.approx(largest, rel=1e-9)
    with server.http() as http:
        assert http.get("/health").json()["backend"]["instruction_set"] == "none"
    gauges = on_policy_gauges(server)
    assert gauges["tokens"] == NUM_SAMPLES * NUM_TOKENS
    assert gauges["ratio_deviation_max"] == pytest.approx(largest, rel=1e-9)
    mean = np.abs(apart).mean()
    assert gauges["logprob_deviation_mean"] == pytest.approx(mean, rel=1e-9)
    assert 0 < mean < 0.1
