"""What a server's draft learns reaches its draft worker by digest: two processes, and a worker that
comes back."""

from pathlib import Path
from typing import Any

import pytest
import tinker

from tests import serving
from tests.e2e.test_draft_worker import draft_worker
from tests.embedded.tiny import write_tiny_model
from tests.waiting import wait_for, wait_for_line
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
                digest = wait_for("the draft was sent", sent)
            line = f"drafts with weights {digest}"
            assert samples(sampler, 0) == before
            wait_for_line(line, first / "worker.log", worker)
            worker.kill()
            worker.wait()
            flags = ("--model", str(small), "--listen", f"127.0.0.1:{port}")
            with draft_worker(second, *flags) as (worker, _):

                def sampled_and_log() -> str:
                    assert samples(sampler, 0) == before
                    return (second / "worker.log").read_text()

                wait_for("it drafts with them", sampled_and_log, lambda log: line in log)
            service.close("success").result()
