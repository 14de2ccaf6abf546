"""A server on which recipes of the cookbook train SmolLM2: what the console's pictures are of."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serving import ROOT, Server, running
from tinkercloud.config import default_data_dir
from tinkercloud.fetch import locate, packaged

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STATE = re.compile(r"^weights: (tinker://\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class TrainingScene:
    """rl: a run that has ended, of rl_async.py; agent_rl.py is training another."""

    server: Server
    rl: str

    @property
    def views(self) -> list[str]:
        """The addresses of all, with the newest checkpoint and the newest capture with rewards."""
        session, capture = self.rl.split(":")[0], self._capture()  # which samples what was saved
        saved = self._newest("/api/v1/checkpoints?limit=100", "checkpoints")
        path = next(c["tinker_path"] for c in saved if c["checkpoint_type"] == "sampler")
        return [
            *("captures", f"captures/{capture}", "runs", f"runs/{self.rl}", "sessions"),
            *(f"sessions/{session}", "samples", "checkpoints", f"chat?model={path}", "queue"),
            *("server", "speculation"),
        ]

    def _newest(self, path: str, name: str) -> list[dict[str, Any]]:
        with self.server.http() as http:
            return http.get(path).raise_for_status().json()[name]

    def _capture(self) -> str:
        """Waits for it: each step of the agent has one of its own."""
        while True:
            for capture in self._newest("/api/v1/captures", "captures"):
                path = f"/api/v1/captures/{capture['capture_id']}/trajectories"
                if any(each["reward"] for each in self._newest(path, "trajectories")):
                    return capture["capture_id"]
            time.sleep(1.0)


@contextmanager
def serving_training(folder: Path) -> Iterator[TrainingScene]:
    """Takes some minutes until there is something to see."""
    smollm2 = packaged("smollm2")
    weights = locate(smollm2, default_data_dir()) or locate(smollm2, ROOT / ".tinkercloud")
    assert weights is not None, "run `make install`"
    with running(Server(("--model", f"{MODEL}={weights}"), folder / "data")) as server:
        state = STATE.search(_said(server, "sft"))[1]  # pyright: ignore[reportOptionalSubscript]
        reached = STATE.search(_said(server, "rl_async", state))[1]  # pyright: ignore[reportOptionalSubscript]
        run = reached.removeprefix("tinker://").split("/")[0]
        agent = subprocess.Popen(_command("agent_rl"), env=_environment(server), cwd=ROOT)
        try:
            yield TrainingScene(server, run)
        finally:
            agent.terminate()
            agent.wait()


def _said(server: Server, recipe: str, *arguments: str) -> str:
    command = _command(recipe, *arguments)
    return subprocess.run(
        command, env=_environment(server), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def _command(recipe: str, *arguments: str) -> Sequence[str]:
    return [sys.executable, f"cookbook/{recipe}.py", *arguments]


def _environment(server: Server) -> dict[str, str]:
    return {**os.environ, **server.sdk_environment, "PYTHONPATH": str(ROOT)}
