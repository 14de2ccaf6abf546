"""`tinkercloud import`: what it leaves in the data folder of a server that is running."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.api.harness import serving
from tinkercloud.cli import main
from tinkercloud.core.types import LoraSpec
from tinkercloud.weights.adapters import fresh_adapter, save_adapter
from tinkercloud.weights.loader import read_config


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """An adapter of attention, for the tiny model."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    spec = LoraSpec(4, 1, train_mlp=False, train_unembed=False)
    shapes = read_config(folder).linear_shapes()
    tensors = fresh_adapter(spec, shapes, torch.device("cpu"))
    save_adapter(tensors, spec, "tiny", directory)
    return directory


@dataclass(frozen=True)
class Import:
    """The command, for the tiny model and a data folder of its own."""

    adapter: Path
    base: Path
    data_dir: Path

    def run(self, *more: str) -> int:
        command = ["import", str(self.adapter), "--base-model", "tiny/llama"]
        command += ["--model", f"tiny/llama={self.base}", "--data-dir", str(self.data_dir)]
        return main([*command, *more])


@pytest.fixture
def command(adapter: Path, folder: Path, tmp_path: Path) -> Import:
    return Import(adapter, folder, tmp_path / "data")


async def test_a_running_server_sees_it_at_once_and_others_do_not(
    command: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(command.data_dir) as api:
        assert await asyncio.to_thread(command.run, "--user", "ann", "--name", "mine") == 0
        path = capsys.readouterr().out.strip()
        assert path.endswith(":train:0/weights/mine")
        info = await api.ok("weights_info", tinker_path=path)
        assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (
            "tiny/llama",
            4,
            False,
        )
        [listed] = (await api.get("checkpoints")).json()["checkpoints"]
        assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "training")
        run_id = path.split("/")[2]
        run = (await api.get(f"training_runs/{run_id}")).json()
        assert run["user_metadata"] == {"imported": "peft"}
        assert (await api.post("optim_step", model_id=run_id, seq_id=1)).status_code == 404
        bob = api.as_user("bob")
        assert (await bob.post("weights_info", tinker_path=path)).status_code == 404
        assert (await bob.get(f"training_runs/{run_id}")).status_code == 404
        assert (await bob.get("checkpoints")).json()["checkpoints"] == []


def test_a_user_without_a_key_is_told_so(
    command: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run("--user", "eve") == 0
    assert "tinkercloud keys add eve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--name", "../up"], "is not allowed"),
        (["--base-model", "other"], "no model 'other' here; known: tiny/llama"),
    ],
    ids=["name", "model"],
)
def test_what_is_wrong_leaves_nothing(
    command: Import, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    assert command.run(*more) == 1
    assert text in capsys.readouterr().err
    assert not (command.data_dir / "checkpoints").exists()


def test_an_adapter_that_is_refused_leaves_nothing(
    command: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    (command.adapter / "adapter_model.safetensors").write_bytes(b"not one")
    assert command.run() == 1
    assert "cannot be read" in capsys.readouterr().err
    assert not (command.data_dir / "checkpoints").exists()
