"""`generate` and `chat` over a drafter and a target in processes of their own; real weights."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import serving
from tests.e2e.clients import MODEL
from tests.waiting import wait_for_line
from tinkercloud.embedded.native.compiler import library
from tinkercloud.speculative.pipeline import Orchestrator, PipelineOptions
from tinkercloud.speculative.remote.connection import ClientSecurity

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

LIMIT_S = 300.0
PROMPT = "one two three four five one two three four five one two three"
COMMAND = (sys.executable, "-m", "tinkercloud")


@contextmanager
def worker(kind: str, folder: Path, *arguments: str) -> Iterator[tuple[str, Path]]:
    """Its address and its log."""
    folder.mkdir()
    log = folder / "log"
    words = ("--listen", "127.0.0.1:0", "--data-dir", str(folder), *arguments)
    with serving.command(kind, *words, log=log) as process:
        yield wait_for_line(r"^ready: (127.0.0.1:\d+)", log, process)[1], log
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()


def said(*arguments: str, text: str = "") -> tuple[str, str]:
    run = subprocess.run(
        [*COMMAND, *arguments], cwd=serving.ROOT, capture_output=True, text=True, input=text,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


@pytest.mark.slow
def test_three_processes_say_what_the_server_says(
    smollm2_gguf: Path, tmp_path: Path, server: serving.Server
) -> None:
    """Text of `generate`, tokens and log-probabilities of the library, and a conversation."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 48, "seed": 5, "temperature": 0.4}
    body |= {"logprobs": 0, "return_token_ids": True}
    with server.http() as http:
        choice = http.post("/oai/api/v1/completions", json=body).json()["choices"][0]
    key = tmp_path / "key"
    key.write_text("the-workers-key")
    common = ("--key-file", str(key))
    draft_worker = worker("draft-worker", tmp_path / "d", "--model", "suffix", *common)
    target_worker = worker("target-worker", tmp_path / "t", "--model", str(smollm2_gguf), *common)
    with draft_worker as (draft, _), target_worker as (target, log):
        sampled = ("--max-tokens", "48", "--seed", "5", "--temperature", "0.4")
        places = ("--target", target, "--draft", draft, *common)
        telemetry = tmp_path / "telemetry.json"
        output, stats = said(
            "generate", *places, *sampled, "--stats", "--telemetry", str(telemetry), PROMPT
        )
        assert output == choice["text"] + "\n"
        assert "drafted tokens accepted" in stats
        [run] = json.loads(telemetry.read_text())["runs"]
        assert sum(each["accepted"] for each in run["rounds"]) > 10
        talk, _ = said("chat", *places, *sampled, text="Hi.\n/stats\nAnd you?\n/quit\n")
        assert re.search(r"\[\d+ tokens in .* rounds", talk)
        options = PipelineOptions(max_tokens=48, seed=5, temperature=0.4)
        with Orchestrator(target, options=options, security=ClientSecurity(key)) as pipeline:
            result = pipeline.run_with_result_sync(PROMPT)
        assert (result.text, result.tokens) == (choice["text"], choice["token_ids"])
        assert result.logprobs == choice["logprobs"]["token_logprobs"]
        assert "the-workers-key" not in log.read_text()


def test_what_cannot_work_is_said_in_a_sentence(tmp_path: Path) -> None:
    for arguments, what, status in (
        (("target-worker", "--model", "absent.gguf"), "there is no such file or folder", 2),
        (("generate", "--target", "nowhere", "x"), "HOST:PORT", 2),
        (("generate", "--target", "127.0.0.1:1", "x"), "127.0.0.1:1: unavailable", 1),
    ):
        run = subprocess.run(
            [*COMMAND, *arguments], cwd=serving.ROOT, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip
        assert run.returncode == status, run.stderr
        assert what in run.stderr
        assert len(run.stderr.splitlines()) == 1
