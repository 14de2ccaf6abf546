"""What the documentation tells a newcomer to run, against a real server on real weights."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.serving import ROOT, Server

PAGE = ROOT / "docs" / "api.md"
MARK = "----- block {} -----"


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def outputs(server: Server) -> list[list[dict]]:
    """What each block printed: a list of JSON values per block."""
    if shutil.which("curl") is None:
        pytest.fail("these tests run curl, which is not installed", pytrace=False)
    script = "set -euo pipefail\n" + "\n".join(
        f"echo; echo '{MARK.format(i)}'\n{block}" for i, block in enumerate(blocks())
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **server.sdk_environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    parts = re.split(r"----- block \d+ -----\n", done.stdout)[1:]
    return [_json_values(part) for part in parts]


def _json_values(text: str) -> list[dict]:
    decoder, values, at = json.JSONDecoder(), [], 0
    while (start := text.find("{", at)) >= 0:
        value, at = decoder.raw_decode(text, start)
        values.append(value)
    return values


def completed(outputs: list[list[dict]]) -> list[dict]:
    return [v["result"] for part in outputs for v in part if v.get("status") == "completed"]


def test_no_command_of_the_page_fails(outputs: list[list[dict]]) -> None:
    assert len(outputs) == len(blocks())
    statuses = [v["status"] for part in outputs for v in part if "status" in v]
    assert set(statuses) == {"ok", "ready", "completed"}


def test_the_training_step_gives_a_loss_and_a_gradient_norm(outputs: list[list[dict]]) -> None:
    losses = [r["metrics"]["loss:sum"] for r in completed(outputs) if "loss:sum" in str(r)]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    norms = [r["metrics"]["unclipped_grad_l2:mean"] for r in completed(outputs) if "grad" in str(r)]
    assert norms[0] > 0


def test_the_samples_have_tokens_and_logprobs(outputs: list[list[dict]]) -> None:
    first, second = (r for r in completed(outputs) if "sequences" in r)
    assert [len(s["tokens"]) == len(s["logprobs"]) for s in first["sequences"]] == [True, True]
    assert second["prompt_logprobs"][0] is None
    assert len(second["prompt_logprobs"]) == 3


def test_the_checkpoint_is_listed(outputs: list[list[dict]]) -> None:
    listings = [v["checkpoints"] for part in outputs for v in part if "checkpoints" in v]
    assert [c["checkpoint_id"] for listing in listings for c in listing] == ["weights/first"] * 2


def test_the_quickstart_teaches_the_secret_word(server: Server) -> None:
    """The script as it is printed, with the official client; its deprecations are errors."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", script],
        env={**os.environ, **server.sdk_environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    losses = [float(line.split()[1]) for line in lines[:20]]
    assert losses[-1] < 0.1 < losses[0]
    # The text after the word is the model's, and may be a new line.
    assert "marzipan" in lines[20]
