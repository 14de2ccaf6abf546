"""What a server's draft learns reaches its draft worker by digest: two processes, and a worker that
comes back."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests import serving
from tests.e2e.test_draft_worker import LIMIT_S, draft_worker
from tests.embedded.tiny import write_tiny_model
from tinkercloud.commands.generation.api_client import ApiClient
from tinkercloud.commands.generation.draft_trainer import DraftTrainer
from tinkercloud.embedded.forward import runners

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here"),
]
MOST_TRAININGS = 12


def samples(sampler: tinker.SamplingClient, seed: int) -> list[Any]:
    """Tokens and log-probabilities."""
    params = tinker.SamplingParams(max_tokens=64, temperature=0.5, stop=[], seed=seed)
    prompt = tinker.ModelInput.from_ints(list(range(20 + seed, 32 + seed)))
    answer = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
    return [(one.tokens, one.logprobs) for one in answer.sequences]


def awaited(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def test_what_is_learned_reaches_the_worker_and_one_that_comes_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are those from before the draft learned."""
    small = write_tiny_model(tmp_path / "draft", seed=1)
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    with draft_worker(first, "--model", str(small)) as (worker, port):
        flags = ("--backend", "embedded", "--model", f"m={folder}", "--engine-threads", "1")
        flags += ("--speculate", f"remote:127.0.0.1:{port}", "--draft-remote-model", str(small))
        with serving.start_server(*flags, data_dir=tmp_path / "data") as server:
            for name, value in server.sdk_environment.items():
                monkeypatch.setenv(name, value)
            service = tinker.ServiceClient()
            sampler = service.create_sampling_client(base_model="m").result()

            before = samples(sampler, 0)
            with ApiClient(server.base_url, server.api_key) as client:

                def sent() -> str:
                    drafter = client.get("/health")["speculation"]["m"]["drafter"]
                    return drafter["workers"][f"127.0.0.1:{port}"]["weights"]

                for number in range(1, MOST_TRAININGS):
                    samples(sampler, number)
                    if "it is drafted with" in DraftTrainer.ask(client, "m").outcome():
                        break
                digest = awaited(sent)
            line = f"drafts with weights {digest}"
            assert samples(sampler, 0) == before
            awaited(lambda: line in (first / "worker.log").read_text())
            worker.kill()
            worker.wait()
            with draft_worker(second, "--model", str(small), "--listen", f"127.0.0.1:{port}"):
                awaited(lambda: samples(sampler, 0) == before and line in _log(second))
            service.close("success").result()


def _log(folder: Path) -> str:
    return (folder / "worker.log").read_text()
