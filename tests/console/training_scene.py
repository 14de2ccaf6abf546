"""A server on which recipes of the cookbook train SmolLM2: what the console's pictures are of."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.serving import ROOT, Server, running
from tinkercloud.config import default_data_dir
from tinkercloud.fetch import locate, packaged

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STATE = re.compile(r"^weights: (tinker://\S+)$", re.M)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingScene:
    """rl: a run that has ended, of rl_async.py. agent: agent_rl.py, which trains another."""

    server: Server
    rl: str
    agent: "subprocess.Popen[bytes]"

    @property
    def views(self) -> Iterator[str]:
        """The addresses of all. The agent waits from the first view of captures on: each of its
        steps deletes its capture."""
        path = self._await(self._sampler)
        session = self.rl.split(":")[0]
        yield from ("queue", "server", "speculation", "runs", f"runs/{self.rl}", "sessions")
        yield from (f"sessions/{session}", "samples", "checkpoints", f"chat?model={path}")
        capture = self._await(self._stopped_at_capture)
        yield from ("captures", f"captures/{capture}")

    def _await(self, find: Callable[[], T | None]) -> T:
        while (found := find()) is None:
            assert self.agent.poll() is None, "the agent has ended before it was pictured"
            time.sleep(0.2)
        return found

    def _sampler(self) -> str | None:
        """The newest."""
        saved = self._listed("/api/v1/checkpoints?limit=100", "checkpoints")
        paths = (c["tinker_path"] for c in saved if c["checkpoint_type"] == "sampler")
        return next(paths, None)

    def _stopped_at_capture(self) -> str | None:
        """One with rewards."""
        if (capture := self._capture()) is None:
            return None
        self.agent.send_signal(signal.SIGSTOP)
        if self._capture() == capture:  # not deleted meanwhile
            return capture
        self.agent.send_signal(signal.SIGCONT)
        return None

    def _capture(self) -> str | None:
        for capture in self._listed("/api/v1/captures", "captures"):
            path = f"/api/v1/captures/{capture['capture_id']}/trajectories"
            rewards = [each["reward"] for each in self._listed(path, "trajectories")]
            if None not in rewards and any(rewards):  # all are there, and not all are 0
                return capture["capture_id"]
        return None

    def _listed(self, path: str, name: str) -> list[dict[str, Any]]:
        """Nothing of what is not there any more."""
        with self.server.http() as http:
            answer = http.get(path)
        return [] if answer.status_code == 404 else answer.raise_for_status().json()[name]


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
            yield TrainingScene(server, run, agent)
        finally:
            agent.kill()
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
