"""`tinkercloud draft-worker`, a server that it drafts for, the official SDK: three processes."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests import serving
from tests.waiting import wait_for, wait_for_line

LIMIT_S = 300.0
KEY = "the-worker-s-key"


@contextmanager
def draft_worker(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """With its port."""
    log = folder / "worker.log"
    words = ("--listen", "127.0.0.1:0", "--data-dir", str(folder / "worker"), *arguments)
    with serving.command("draft-worker", *words, log=log) as process:
        yield process, int(wait_for_line(r"^ready: 127.0.0.1:(\d+)", log, process)[1])


def sampled(sampler: tinker.SamplingClient) -> list[tuple[list[int], list[float] | None]]:
    """Text that repeats itself, greedy and drawn: its next lines can be looked up."""
    prompt = tinker.ModelInput.from_ints(list(range(100, 120)) * 4)
    found = []
    for temperature in (0.0, 0.3):
        params = tinker.SamplingParams(max_tokens=80, temperature=temperature, stop=[], seed=7)
        answer = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
        found += [(one.tokens, one.logprobs) for one in answer.sequences]
    return found


def wait_for_figures(
    http: httpx.Client, least_accepted: int, sample: Callable[[], object]
) -> dict[str, Any]:
    """Of speculation, which come about once a second: once so many drafted tokens are accepted. How
    many samples that takes depends on what drafts cost on this machine."""

    def figures_so_far() -> dict[str, Any]:
        sample()
        return http.get("/health").json().get("speculation", {}).get("m", {})

    def num_accepted(figures: dict[str, Any]) -> int:
        depths = figures.get("drafters", {}).get("remote", {}).get("depths", [])
        return sum(depth["accepted"] for depth in depths)

    return wait_for(
        f"{least_accepted} drafted tokens are accepted",
        figures_so_far,
        lambda figures: num_accepted(figures) >= least_accepted,
        poll_s=0.1,
    )


def test_a_worker_drafts_and_its_death_changes_no_sample(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    flags = ("--model", "suffix", "--key-file", str(key_file))
    with draft_worker(tmp_path, *flags) as (worker, port):
        remote = ("--speculate", f"remote:127.0.0.1:{port}", "--draft-remote-key-file")
        arguments = ("--model", f"m={smollm2_gguf}", *remote, str(key_file))
        with serving.start_server(*arguments, data_dir=tmp_path / "data") as server:
            for name, value in server.sdk_environment.items():
                monkeypatch.setenv(name, value)
            service = tinker.ServiceClient()
            sampler = service.create_sampling_client(base_model="m").result()
            drafted = [sampled(sampler) for _ in range(2)]
            with server.http() as http:
                figures = wait_for_figures(http, 20, lambda: drafted.append(sampled(sampler)))
                metrics = http.get("/metrics").text
            assert figures["drafter"]["workers"][f"127.0.0.1:{port}"]["connected"]
            assert figures["drafter"]["workers"][f"127.0.0.1:{port}"]["taken"] > 0
            assert f'remote_connected{{worker="127.0.0.1:{port}"}} 1.0' in metrics
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(LIMIT_S) == 0
            plain = sampled(sampler)
            service.close("success").result()
            assert KEY not in server.output()
            assert "no drafts from" in server.output()
    assert drafted == [plain] * len(drafted)


def refused(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "tinkercloud", *arguments],
        cwd=serving.ROOT, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    return run.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--model", "absent.gguf"), "there is no such file or folder"),
        (("--model", "suffix", "--listen", "0.0.0.0:0"), "without a key"),
        (("--model", "suffix", "--listen", "nowhere"), "HOST:PORT"),
        (("--model", "suffix", "--key-file", "absent"), "cannot read the key"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(
    arguments: Sequence[str], what: str, tmp_path: Path
) -> None:
    assert what in refused("draft-worker", "--data-dir", str(tmp_path), *arguments)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--speculate", "remote:nowhere"), "HOST:PORT"),
        (("--speculate", "remote:"), "remote:HOST:PORT"),
        pytest.param(
            ("--speculate", "remote:a:1", "--draft-remote-key-file", "absent"),
            "cannot read the key",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_says_which_address_or_key_it_cannot_use(
    arguments: Sequence[str], what: str, folder: Path, tmp_path: Path
) -> None:
    flags = ("serve", "--port", "0", "--model", f"m={folder}", "--data-dir", str(tmp_path))
    assert what in refused(*flags, *arguments)
