"""Tokenizers by the names that clients ask for, in a cache as the hub's library keeps it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tokenizers_made import byte_level
from tinkercloud.backends.fake import TINY
from tinkercloud.core.types import ServedModel
from tinkercloud.services.chats.tokenizer_hub import MARK, hub_names, write_hub

INSTRUCT = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
# As SDKs load a tokenizer: 0.38's function, which knows other names and revisions of some.
LOAD = """
import json, sys
from tinker.lib.public_interfaces.sampling_client import _load_tokenizer_from_model_info as sdk
from tinker_cookbook.tokenizer_utils import get_tokenizer as cookbook
for name in sys.argv[1:]:
    load = cookbook if name.startswith("cookbook:") else sdk
    print(json.dumps(load(name.removeprefix("cookbook:")).encode("one two")))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: its tokenizer, and what else lies beside weights."""
    folder = tmp_path_factory.mktemp("model")
    byte_level(300).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def served(name: str, folder: Path | None) -> ServedModel:
    return replace(TINY, name=name, tokenizer_path=folder)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B",)),
        ("Qwen/Qwen3-8B:peft:262144", ("Qwen/Qwen3-8B",)),
        ("org/model/variant", ("org/model",)),
        ("local", ("local",)),
        ("/srv/models/x", ()),
        ("../../x", ()),
        ("a/..", ()),
        ("a b/c", ()),
        (
            "meta-llama/Llama-3.1-8B",
            (
                "meta-llama/Llama-3.1-8B",
                INSTRUCT,
                "thinkingmachineslabinc/meta-llama-3-tokenizer",
            ),
        ),
        (
            "moonshotai/Kimi-K2.5-Text-Only",
            ("moonshotai/Kimi-K2.5-Text-Only", "moonshotai/Kimi-K2.5"),
        ),
    ],
)
def test_clients_look_for_a_tokenizer_under_these_names(name: str, names: tuple[str, ...]) -> None:
    assert hub_names(name) == names


def test_the_sdk_and_the_cookbook_find_tokenizers_offline(source: Path, tmp_path: Path) -> None:
    models = [
        "Qwen/Qwen3-4B-Instruct-2507",
        "meta-llama/Llama-3.1-8B",
        "moonshotai/Kimi-K2-Thinking",
        "org/model/variant",
        "local",
    ]
    write_hub(tmp_path, [served(name, source) for name in models])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    found = subprocess.run(
        [sys.executable, "-c", LOAD, *models, "cookbook:Qwen/Qwen3-4B-Instruct-2507"],
        env={**inherited, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    ids = byte_level(300).encode("one two").ids
    assert [json.loads(line) for line in found.stdout.splitlines()] == [ids] * 6


def test_weights_are_not_copied(source: Path, tmp_path: Path) -> None:
    assert write_hub(tmp_path, [served("a/b", source)]) == ["a/b"]
    [snapshot] = (tmp_path / "hub" / "models--a--b" / "snapshots").iterdir()
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in snapshot.iterdir()) == names
    revision = (tmp_path / "hub" / "models--a--b" / "refs" / "main").read_text()
    assert revision == snapshot.name


def test_a_restart_leaves_what_is_right_and_removes_what_is_not_served(
    source: Path, tmp_path: Path
) -> None:
    write_hub(tmp_path, [served("a/b", source), served("c/d", source)])
    file = next((tmp_path / "hub" / "models--a--b" / "snapshots").glob("*/tokenizer.json"))
    before = file.stat().st_ino
    downloaded = tmp_path / "hub" / "models--x--y" / "snapshots"
    downloaded.mkdir(parents=True)
    assert write_hub(tmp_path, [served("a/b", source), served("x/y", source)]) == ["a/b", "x/y"]
    assert file.stat().st_ino == before
    assert not (tmp_path / "hub" / "models--c--d").exists()
    assert list(downloaded.iterdir()) == []  # a user's own: neither removed nor written


def test_another_tokenizer_by_the_same_name_replaces_the_old_one(
    source: Path, tmp_path: Path
) -> None:
    write_hub(tmp_path / "home", [served("a/b", source)])
    other = tmp_path / "other"
    other.mkdir()
    byte_level(280).save(str(other / "tokenizer.json"))
    write_hub(tmp_path / "home", [served("a/b", other)])
    repository = tmp_path / "home" / "hub" / "models--a--b"
    assert (repository / MARK).exists()
    [snapshot] = (repository / "snapshots").iterdir()
    assert [path.name for path in snapshot.iterdir()] == ["tokenizer.json"]
    assert (repository / "refs" / "main").read_text() == snapshot.name


def test_a_model_without_a_tokenizer_has_no_folder(tmp_path: Path) -> None:
    assert write_hub(tmp_path, [served("fake/tiny", None)]) == []
