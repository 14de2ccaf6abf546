"""A training run over kills: the server's or its engine's process ends by SIGKILL while the run is
underway, and what a client sees is, bit for bit, what it would have seen."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tinker

import tinker_gmi
from tests.e2e.clients import MODEL, Client, logprobs_of
from tests.serving import start_server
from tinkercloud.embedded.native.compiler import library

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C compiler here"),
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="the engine is found in /proc"),
]

NUM_STEPS = 6
NUM_TOKENS = 48
Disturb = Callable[[str], None]


def tokens_of(number: int) -> list[int]:
    return [(7 * i * i + 13 * number) % 40_000 for i in range(NUM_TOKENS)]


def run(client: Client, disturb: Disturb) -> list[Any]:
    """What the client sees of some steps of training and sampling. disturb is told where it is."""
    model = client.model()
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        passes = [
            model.forward_backward([client.supervised(tokens_of(number))], "cross_entropy")
            for number in (step, step + 100)
        ]
        stepped = model.optim_step(client.adam())
        disturb(f"acknowledged {step}")
        seen += [logprobs_of(each.result()).tolist() for each in passes]
        seen.append(stepped.result().metrics["unclipped_grad_l2:mean"])
        sampler = model.save_weights_and_get_sampling_client()
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        params = client.params(max_tokens=24, temperature=1.0, seed=step, stop=[])
        future = sampler.sample(client.prompt([1, 2, 3 + step]), 2, params)
        disturb(f"sampling {step}")
        for sequence in future.result().sequences:
            seen.append((list(sequence.tokens), list(sequence.logprobs)))
    return seen


KILLS = {
    "acknowledged 1": "server",
    "sampling 1": "engine",
    "acknowledged 2": "engine",
    "sampling 3": "server",
    "acknowledged 4": "server",
    "acknowledged 5": "SIGTERM",
}


@pytest.fixture(scope="module")
def undisturbed(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    data_dir = tmp_path_factory.mktemp("undisturbed") / "data"
    with start_server("--model", f"{MODEL}={smollm2_gguf}", data_dir=data_dir) as server:
        client = Client.connect(tinker, server)
        seen = run(client, lambda _: None)
        client.close()
    return seen


@pytest.mark.parametrize("sdk", [tinker, tinker_gmi], ids=lambda sdk: sdk.__name__)
def test_a_run_over_kills_is_the_run_without_them(
    sdk: ModuleType, smollm2_gguf: Path, tmp_path: Path, undisturbed: list[Any]
) -> None:
    done: list[str] = []
    with start_server("--model", f"{MODEL}={smollm2_gguf}", data_dir=tmp_path / "data") as server:

        def disturb(place: str) -> None:
            match KILLS.get(place):
                case "server":
                    server.restart(how=signal.SIGKILL)
                case "SIGTERM":
                    server.restart()
                case "engine":
                    os.kill(server.engine_pid(), signal.SIGKILL)
                case _:
                    return
            done.append(place)

        client = Client.connect(sdk, server)
        seen = run(client, disturb)
        client.close()
    assert done == list(KILLS)
    assert seen == undisturbed
