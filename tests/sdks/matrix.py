"""The scenario of `scenario.py` with every SDK of `versions.txt`, each in its own environment.

`python -m tests.sdks.matrix` runs all of them on the fake backend, writes `results.json`, and puts
the table of features into docs/move.md. `make sdks` makes the environments.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import serving
from tests.sdks.scenario import ABSENT, FEATURES

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = serving.ROOT / "docs" / "move.md"
MARK = re.compile(r"<!-- sdks -->\n(?:\|.*\n)*")
FAKE_MODEL = "fake/tiny"
LEARNING_RATE = 0.01  # right for the fake model; real ones take less
LIMIT_S = 600.0

# What the table says of each feature of the scenario.
TITLES = {
    "sft": "supervised training",
    "forward": "log-probabilities (`forward`), without `weights`",
    "rl": "sample, `importance_sampling`, step",
    "custom_loss": "`forward_backward_custom`",
    "chunks": "batches of more than one request",
    "failures": "a refused batch; the client goes on",
    "save": "`save_state`, `save_weights_for_sampler`",
    "load": "`load_state` into a new model",
    "resume": "resume with the optimizer's state",
    "sample_saved": "sample saved weights",
    "prompt_logprobs": "log-probabilities of prompts, top k",
    "listings": "runs, checkpoints, `weights_info`, models",
    "publish": "publish, unpublish",
    "expiry": "set the time to live",
    "download": "`tinker checkpoint download`",
    "command_line": "`tinker checkpoint list`, `tinker run info`",
    "delete": "delete a checkpoint",
    "unload": "`unload_model`",
}
assert tuple(TITLES) == FEATURES


class ScenarioFailed(AssertionError):
    """The scenario itself ended; the text is what it wrote."""


def versions() -> list[str]:
    """Oldest first."""
    return (HERE / "versions.txt").read_text().split()


def interpreter(version: str) -> Path:
    return serving.ROOT / f".venv-sdk-{version}" / "bin" / "python"


def run_scenario(
    python: Path, server: serving.Server, model: str, learning_rate: float = LEARNING_RATE
) -> dict[str, Any]:
    """The printed object of the scenario in one environment. Raises ScenarioFailed."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(python), str(HERE / "scenario.py"), model, str(learning_rate)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**inherited, **server.sdk_environment},
        cwd=server.data_dir.parent,
        check=False,
    )
    if done.returncode != 0:
        raise ScenarioFailed(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def read_results() -> dict[str, dict[str, str]]:
    """Version -> feature -> verdict, as last measured."""
    return json.loads(RESULTS.read_text())


def faults(report: Mapping[str, Any]) -> str:
    """The features that failed, with their errors; empty when all work."""
    features = report["features"].items()
    return "\n".join(f"{name}: {f['error']}" for name, f in features if not f["ok"])


def verdicts(report: Mapping[str, Any]) -> dict[str, str]:
    """Feature -> "works", "fails", or "absent" where the SDK has no call for it."""
    return {
        name: "fails" if not f["ok"] else "absent" if f["result"] == ABSENT else "works"
        for name, f in report["features"].items()
    }


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Features by versions, in Markdown."""
    signs = {"works": "yes", "fails": "**no**", "absent": "-"}
    head = "".join(f" {version} |" for version in results)
    lines = [f"| with the SDK |{head}", "|---|" + "---|" * len(results)]
    for name, title in TITLES.items():
        cells = "".join(f" {signs[verdict[name]]} |" for verdict in results.values())
        lines.append(f"| {title} |{cells}")
    return "\n".join(lines) + "\n"


def with_table(text: str, results: Mapping[str, Mapping[str, str]]) -> str:
    return MARK.sub(lambda _: "<!-- sdks -->\n" + table(results), text)


def measure(chosen: Sequence[str]) -> dict[str, dict[str, str]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving.start_server("--backend", "fake", data_dir=Path(folder) / "data") as server,
    ):
        return {
            version: verdicts(run_scenario(interpreter(version), server, FAKE_MODEL))
            for version in chosen
        }


def main() -> None:
    results = measure(versions())
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
