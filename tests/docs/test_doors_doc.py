"""docs/doors.md: its blocks run, its table is that of the tests."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.chat.live_server import MODEL, live_server
from tests.docs.doors_table import PAGE, missing_tests, with_table

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = PAGE.read_text(encoding="utf-8")
SAID = "Hello to you."


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


def test_the_table_is_that_of_the_tests() -> None:
    assert with_table(TEXT) == TEXT, "write it anew: python -m tests.docs.doors_table"
    assert missing_tests() == []


def test_every_block_runs(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        environment = {**os.environ, "TINKER_API_KEY": server.keys["ann"]}
        exports, calls = (block.replace(NAME, MODEL) for block in blocks("bash"))
        exports = exports.replace("http://127.0.0.1:8700", server.url)
        for code in blocks("python"):
            server.backend.script.append(SAID)
            run = f'{exports}\n{sys.executable} -c "$CODE"'
            done = output(run, environment | {"CODE": code.replace(NAME, MODEL)})
            assert done.strip() == SAID
        server.backend.script += [SAID, SAID]
        done = output(f"{exports}\n{calls}", environment)
        assert f'"content": "{SAID}"' in done
        assert "event: message_stop" in done


def output(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_agent_framework_is_the_one_of_the_tests() -> None:
    assert f"smolagents {version('smolagents')} " in TEXT
