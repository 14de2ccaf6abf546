"""Tokens of Ray on two simulated nodes: who is let in, and what is said to whom is not. A Ray of
our own leaves nothing in the home folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import Nodes, environment, ray, ray_nodes
from tests.serving import ROOT
from tinkercloud.doctor.checks import BY_NAME
from tinkercloud.doctor.diagnosis import Line, diagnose
from tinkercloud.doctor.facts import gather
from tinkercloud.doctor.target import Target

TOKEN = "0123456789abcdef" * 4
# In a process of its own: Ray keeps the mode and the token that it saw first.
SESSION = """
import asyncio, sys
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.gpus.ray_session import RaySession
from tinkercloud.config import ClusterConfig
from tinkercloud.errors import ConfigError

async def forget():
    pass

async def main():
    config = ClusterConfig(ray_address=sys.argv[1] or None, device="cpu")
    session = RaySession(config, RayLink(), forget)
    try:
        shape = await session.start()
    except ConfigError as error:
        return print("refused:", error)
    import ray

    class Actor:
        def answer(self):
            return "an actor answers"

    nodes = sum(node["Alive"] for node in ray.nodes())
    print(nodes, "nodes,", shape.gpus, "CPUs;", await ray.remote(Actor).remote().answer.remote())
    await session.stop()

asyncio.run(main())
"""


def session(address: str, home: Path, **variables: str) -> str:
    """What a server that joins this Ray ("": starts one) comes to see, or why it does not start."""
    answer = subprocess.run(
        [sys.executable, "-c", SESSION, address],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=environment(home, **variables),
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "ray_token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="module")
def plain(home: Path):
    with ray_nodes(home) as nodes:
        nodes.start_head()
        nodes.join()
        yield nodes


@pytest.fixture(scope="module")
def guarded(home: Path, token_file: Path):
    """Started as the walk-through says."""
    with ray_nodes(home) as nodes:
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        nodes.start_head(**variables)
        nodes.join(**variables)
        yield nodes


def test_a_ray_of_our_own_leaves_no_token_behind(home: Path):
    assert session("", home).endswith("an actor answers")
    assert not (home / ".ray" / "auth_token").exists()


class TestWithoutTokens:
    def test_the_server_joins_two_nodes(self, plain: Nodes, home: Path):
        assert session(plain.address, home) == "2 nodes, 4 CPUs; an actor answers"

    def test_a_token_that_lies_about_does_no_harm(self, plain: Nodes, tmp_path: Path):
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
        assert session(plain.address, tmp_path) == "2 nodes, 4 CPUs; an actor answers"

    def test_who_asks_for_tokens_is_told_that_there_are_none(self, plain: Nodes, home: Path):
        text = session(plain.address, home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
        assert text.startswith("refused:")
        assert "started without tokens" in text
        assert "unset RAY_AUTH_MODE" in text


class TestWithTokens:
    def test_the_server_joins_two_nodes(self, guarded: Nodes, home: Path, token_file: Path):
        for mode in ({}, {"RAY_AUTH_MODE": "token"}):
            text = session(guarded.address, home, RAY_AUTH_TOKEN_PATH=str(token_file), **mode)
            assert text == "2 nodes, 4 CPUs; an actor answers"

    @pytest.mark.parametrize(
        ("variables", "reason"),
        [
            ({}, "there is none here"),
            ({"RAY_AUTH_TOKEN": "another"}, "another token than that of RAY_AUTH_TOKEN"),
            ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is disabled here"),
            ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "/nowhere, which cannot be read"),
        ],
    )
    def test_who_has_no_such_token_reads_what_to_set(
        self, guarded: Nodes, home: Path, variables: dict[str, str], reason: str
    ):
        text = session(guarded.address, home, **variables)
        assert text.startswith("refused:")
        assert reason in text
        assert "RAY_AUTH_TOKEN_PATH" in text

    def test_a_node_without_the_token_is_what_ray_itself_refuses(self, guarded: Nodes, home: Path):
        answer = ray(home, "health-check", "--address", guarded.address)
        assert answer.returncode != 0
        assert "InvalidAuthToken" in answer.stderr

    def test_the_doctor_says_which_token_is_used(
        self, guarded: Nodes, home: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
    ):
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token_file))
        line = doctor_line(guarded.address, home)
        assert line.finding.fact.endswith(f"with the token of RAY_AUTH_TOKEN_PATH={token_file}")
        monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
        line = doctor_line(guarded.address, home)
        assert line.blocks
        assert "demands a token, and there is none here" in line.finding.fact


def doctor_line(address: str, home: Path) -> Line:
    target = Target("cluster", home / "data", ray_address=address, needs_gpus=False)
    check = BY_NAME["Ray"]
    return diagnose(target, gather(target, check.reads), [check]).lines[0]
