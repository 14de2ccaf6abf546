"""Every command of the official command line, found in its own tree, against a server."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import tinker
from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib.internal_client_holder import sessionless_holder_cache

from tests.e2e.clients import Client
from tests.e2e.stand_in_hub import stand_in_hub
from tests.embedded.tiny import write_tiny_model
from tests.sdks.scenario import ended_well
from tests.serving import ROOT, Server, start_server
from tinkercloud.storage.keys import KeyStore

MODEL = "tiny/llama"
COVERED: set[str] = set()


def covers(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs this command to its result."""
    COVERED.add(command)
    return lambda test: test


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of all commands in a tree of groups."""
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from commands(inner, (*path, name))


def test_every_command_of_the_command_line_is_run_here() -> None:
    assert sorted(commands(main_cli)) == sorted(COVERED)


def test_the_page_has_a_row_for_every_command() -> None:
    text = (ROOT / "docs/weights.md").read_text(encoding="utf-8").partition("<!-- cli -->")[2]
    rows = re.findall(r"^\| `([a-z -]+)` \|", text, re.M)
    assert rows == sorted(commands(main_cli))


@dataclass
class Terminal:
    """The command line of one user."""

    server: Server
    key: str
    home: Path

    def result(self, *arguments: str, answer: str | None = None, **environment: str) -> Result:
        variables: dict[str, str | None] = {
            **self.server.sdk_environment,
            "TINKER_API_KEY": self.key,
            "HOME": str(self.home),
            **environment,
        }
        # A command is a process of its own: the SDK keeps the client of the first key of a process.
        sessionless_holder_cache._holders.clear()
        return CliRunner().invoke(main_cli, arguments, input=answer, env=variables)

    def run(self, *arguments: str, answer: str | None = None, **environment: str) -> str:
        """What the command printed; it succeeded."""
        result = self.result(*arguments, answer=answer, **environment)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run("--format", "json", *arguments))

    def error(self, *arguments: str, **environment: str) -> str:
        """What the user reads when the command fails."""
        result = self.result(*arguments, **environment)
        assert result.exit_code != 0, result.output
        error = result.exception
        assert isinstance(error, TinkerCliError), (result.output, error)
        return f"{error.message}\n{error.details or ''}"


@dataclass(frozen=True)
class Account:
    """A user with a run and its checkpoints; paths by segment."""

    terminal: Terminal
    client: Client
    run_id: str
    model: Any

    def save(self, segment: str, name: str) -> str:
        """The path of a new checkpoint."""
        save = {
            "weights": self.model.save_state,
            "sampler_weights": self.model.save_weights_for_sampler,
            "external_weights": self.model.save_weights_external,
        }[segment]
        return save(name).result().path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("cli")
    folder = write_tiny_model(root / "tiny")
    model = ("--model", f"{MODEL}={folder}", "--dtype", "float32", "--speculate", "off")
    with start_server(*model, data_dir=root / "data") as server:
        yield server


@pytest.fixture(scope="module")
def ann(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    client = Client.connect(tinker, server)
    model = client.service.create_lora_training_client(
        MODEL, rank=4, user_metadata={"note": "n"}
    ).result()
    client.train(model, [client.supervised([1, 2, 3, 4])])
    terminal = Terminal(server, server.api_key, tmp_path_factory.mktemp("ann"))
    yield Account(terminal, client, model.model_id, model)
    client.close()


@pytest.fixture(scope="module")
def bob(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    """Another user, without anything."""
    keys = KeyStore(server.data_dir)
    key = keys.add("bob")
    keys.close()
    return Terminal(server, key, tmp_path_factory.mktemp("bob"))


@pytest.fixture
def tinker_(ann: Account) -> Terminal:
    return ann.terminal


@covers("version")
def test_version(tinker_: Terminal) -> None:
    assert tinker.__version__ in tinker_.run("version")


def test_the_installed_program_is_the_same(tinker_: Terminal) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tinker.cli", "model", "list"],
        env={**tinker_.server.sdk_environment, "HOME": str(tinker_.home), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended_well(run), run.stderr
    assert MODEL in run.stdout


@covers("auth status")
def test_auth_status(tinker_: Terminal) -> None:
    assert "Tinker accessible: yes" in tinker_.run("auth", "status")
    wrong = tinker_.result("auth", "status", TINKER_API_KEY="tml-wrong")
    assert wrong.exit_code != 0
    assert "Tinker accessible: no" in wrong.output


@covers("auth whoami")
def test_auth_whoami(tinker_: Terminal, bob: Terminal) -> None:
    assert "default" in tinker_.run("auth", "whoami")
    assert "bob" in bob.run("auth", "whoami")


@covers("auth login")
@covers("auth logout")
def test_auth_login_and_logout(server: Server, bob: Terminal, tmp_path: Path) -> None:
    fresh = Terminal(server, "", tmp_path)
    printed = fresh.run("auth", "login", answer=f"{bob.key}\n")
    assert "Logged in as" in printed
    assert bob.key not in printed
    assert MODEL in fresh.run("model", "list")
    assert "Already logged in" in fresh.error("auth", "login")
    assert "still active" in fresh.run("auth", "logout")
    assert MODEL in bob.run("model", "list")
    assert "There is nothing to log out from" in fresh.error("auth", "logout")


def test_a_wrong_key_does_not_log_in(server: Server, tmp_path: Path) -> None:
    fresh = Terminal(server, "", tmp_path)
    result = fresh.result("auth", "login", answer="tml-wrong\n")
    assert "Could not validate the API key" in str(result.exception)


@covers("model list")
def test_model_list(tinker_: Terminal) -> None:
    assert MODEL in tinker_.run("model", "list")
    assert MODEL in tinker_.run("model", "list", "TINY")


@covers("run list")
@covers("run info")
def test_runs(ann: Account, bob: Terminal) -> None:
    listed = ann.terminal.json("run", "list")["runs"]
    assert ann.run_id in {run["training_run_id"] for run in listed}
    assert ann.run_id in ann.terminal.run("run", "info", ann.run_id)
    assert ann.terminal.json("run", "info", ann.run_id)["lora_rank"] == 4
    assert bob.json("run", "list")["runs"] == []
    assert ann.run_id in bob.error("run", "info", ann.run_id)


@covers("checkpoint list")
@covers("checkpoint info")
def test_checkpoints(ann: Account, bob: Terminal) -> None:
    paths = {s: ann.save(s, "l") for s in ("weights", "sampler_weights", "external_weights")}
    for listing in (["--run-id", ann.run_id], ["--limit", "0"]):
        listed = ann.terminal.json("checkpoint", "list", *listing)["checkpoints"]
        assert {*paths.values()} <= {c["tinker_path"] for c in listed}
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    for segment, path in paths.items():
        info = ann.terminal.json("checkpoint", "info", path)
        assert (info["checkpoint_type"], info["lora_rank"]) == (kinds[segment], 4)
        assert "Failed to retrieve checkpoint" in bob.error("checkpoint", "info", path)
    assert bob.json("checkpoint", "list")["checkpoints"] == []
    assert ann.run_id in bob.error("checkpoint", "list", "--run-id", ann.run_id)


@covers("checkpoint publish")
@covers("checkpoint unpublish")
def test_publish_and_unpublish(ann: Account, bob: Terminal) -> None:
    path = ann.save("weights", "p")
    assert "does not exist" in bob.error("checkpoint", "publish", path)
    for verb, public in (("publish", True), ("unpublish", False)):
        ann.terminal.run("checkpoint", verb, path)
        assert ann.terminal.json("checkpoint", "info", path)["public"] is public
        if public:
            listed = bob.json("checkpoint", "list", "--run-id", ann.run_id)["checkpoints"]
            assert [c["tinker_path"] for c in listed] == [path]
    assert "does not exist" in bob.error("checkpoint", "list", "--run-id", ann.run_id)


@covers("checkpoint set-ttl")
def test_set_ttl(ann: Account, bob: Terminal) -> None:
    path = ann.save("weights", "t")
    ann.terminal.run("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert ann.terminal.json("checkpoint", "info", path)["expires_at"] is not None
    ann.terminal.run("checkpoint", "set-ttl", path, "--remove")
    assert ann.terminal.json("checkpoint", "info", path)["expires_at"] is None
    assert "does not exist" in bob.error("checkpoint", "set-ttl", path, "--ttl", "7200")


@covers("checkpoint delete")
def test_delete(ann: Account, bob: Terminal) -> None:
    paths = [ann.save("weights", f"d{index}") for index in range(3)]
    bob.result("checkpoint", "delete", paths[0], "--yes")
    ann.terminal.run("checkpoint", "info", paths[0])
    ann.terminal.run("checkpoint", "delete", *paths[:2], "--yes")
    assert "not found" in ann.terminal.error("checkpoint", "info", paths[0])
    filters = ("--type", "training", "--before", "2020-01-01")
    ann.terminal.run("checkpoint", "delete", "--run-id", ann.run_id, *filters, "--yes")
    ann.terminal.run("checkpoint", "info", paths[2])


@covers("checkpoint download")
@pytest.mark.parametrize("segment", ["weights", "external_weights"])
def test_download(ann: Account, bob: Terminal, tmp_path: Path, segment: str) -> None:
    path = ann.save(segment, "down")
    ann.terminal.run("checkpoint", "download", path, "--output", str(tmp_path))
    [folder] = tmp_path.iterdir()
    names = {file.name for file in folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    bob.error("checkpoint", "download", path, "--output", str(tmp_path / "bob"))
    listed = ann.terminal.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert "external_weights/download" not in {c["checkpoint_id"] for c in listed}


def test_sampler_weights_are_refused_by_the_client(ann: Account, tmp_path: Path) -> None:
    path = ann.save("sampler_weights", "down")
    error = ann.terminal.error("checkpoint", "download", path, "--output", str(tmp_path))
    assert "Sampler checkpoints cannot be downloaded" in error


@covers("checkpoint push-hf")
def test_push_hf(ann: Account, tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its address once."""
    path = ann.save("weights", "push")
    with stand_in_hub() as hub:
        environment = {
            **ann.terminal.server.sdk_environment,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_x",
            "HOME": str(tmp_path),
            "PATH": "",
        }
        run = subprocess.run(
            [sys.executable, "-m", "tinker.cli", "checkpoint", "push-hf", path, "-r", "ann/a"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert ended_well(run), run.stderr
    files = hub.files["ann/a"]
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= files.keys()
    assert MODEL in files["README.md"].decode()
    assert path in files["README.md"].decode()
    assert hub.visibility == {"ann/a": "private"}


def test_push_hf_without_a_hub_says_how_to_log_in(ann: Account) -> None:
    error = ann.terminal.error("checkpoint", "push-hf", ann.save("weights", "nohub"))
    assert error == "Not logged in\nRun: hf auth login"


@covers("session export-trace")
def test_export_trace(ann: Account, bob: Terminal, tmp_path: Path) -> None:
    session_id = ann.run_id.partition(":")[0]
    target = tmp_path / "trace.pftrace"
    ann.terminal.run("session", "export-trace", session_id, "--output", str(target))
    assert target.stat().st_size > 0
    bob.error("session", "export-trace", session_id)


def window() -> list[str]:
    """The hours around now, as billing asks for them."""
    hour = time.time() // 3600 * 3600
    moments = (time.gmtime(hour + 3600 * offset) for offset in (-1, 2))
    return [time.strftime("%Y-%m-%dT%H:%M:%SZ", moment) for moment in moments]


@covers("billing usage")
def test_billing_usage(ann: Account, bob: Terminal) -> None:
    rows = ann.terminal.json("billing", "usage", *window())["data"]
    counted = [row["event_info"] for row in rows if row["event_info"]["type"] == "training"]
    assert sum(event["token_count"] for event in counted) >= 3
    assert bob.json("billing", "usage", *window())["data"] == []


@covers("billing checkpoint-storage")
def test_billing_checkpoint_storage(ann: Account, bob: Terminal) -> None:
    ann.save("weights", "stored")
    rows = ann.terminal.json("billing", "checkpoint-storage")["data"]
    assert sum(row["checkpoint_count"] for row in rows) >= 1
    assert sum(row["size_bytes"] for row in rows) > 10_000
    assert bob.json("billing", "checkpoint-storage")["data"] == []
