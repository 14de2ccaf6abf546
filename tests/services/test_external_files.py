"""Exports and archives as pieces of files, against safetensors and tarfile."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from tinkercloud.backends.fake import TINY
from tinkercloud.errors import ServerFault
from tinkercloud.services.checkpoints.archive import tar_of
from tinkercloud.services.checkpoints.external_files import (
    FileSlice,
    Parts,
    exported_files,
    whole,
    write_export,
)

TENSORS = {
    "model.embed_tokens": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.layers.0.self_attn.q_proj": np.full((4, 4), 0.5, np.float32),
    "model.layers.0.self_attn.q_proj.bias": np.ones(4, np.float32),
    "model.layers.0.mlp.gate.e_score_correction_bias": np.zeros(2, np.float32),
    "model.norm": np.zeros(4, np.float32),
}


def content(parts: Parts) -> bytes:
    data = b"".join(parts.read())
    assert len(data) == parts.num_bytes
    return data


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A checkpoint of a full-parameter model, with what only this server reads."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"exp_avg.x": np.ones(1)}, folder / "optimizer.safetensors")
    (folder / "training_state.json").write_text("{}")
    (folder / "manifest.json").write_text("{}")
    return folder


def test_full_weights_have_the_names_of_hugging_face(full: Path) -> None:
    files = exported_files(full, None)
    assert list(files) == ["model.safetensors"]
    data = content(files["model.safetensors"])
    tensors = load(data)
    expected = {n if n.endswith("bias") else f"{n}.weight": t for n, t in TENSORS.items()}
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
    assert int.from_bytes(data[:8], "little") % 8 == 0  # where tensors begin
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"] == {
        "format": "pt"
    }


def test_full_weights_come_with_config_and_tokenizer(full: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("x")
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    served = replace(TINY, hf_config=config, tokenizer_path=tmp_path)
    files = exported_files(full, served)
    assert {*files} == {"model.safetensors", "config.json", "tokenizer.json"}
    written = json.loads(content(files["config.json"]))
    assert written == {"model_type": "llama", "dtype": "float32", "torch_dtype": "float32"}


def test_an_adapter_is_pefts_two_files_as_they_are(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "training_state.json"):
        (tmp_path / name).write_text(name)
    files = exported_files(tmp_path, None)
    assert {name: content(parts).decode() for name, parts in files.items()} == {
        name: name for name in ("adapter_config.json", "adapter_model.safetensors")
    }


def test_a_written_export_is_what_an_archive_has(full: Path, tmp_path: Path) -> None:
    expected = {name: content(parts) for name, parts in exported_files(full, TINY).items()}
    target = tmp_path / "export"
    target.mkdir()
    write_export(full, target, TINY)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == expected
    assert not full.exists()


def test_an_export_of_an_export_is_itself(full: Path, tmp_path: Path) -> None:
    """Names that were changed once are not changed again."""
    target = tmp_path / "export"
    target.mkdir()
    write_export(full, target, replace(TINY, hf_config={"model_type": "llama"}))
    for name, parts in exported_files(target, None).items():
        assert content(parts) == (target / name).read_bytes()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3_000_000])
def test_an_archive_is_what_tarfile_reads(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "a").write_bytes(data)
    archive = tar_of({"a": whole(tmp_path / "a"), "b": Parts((b"xy",))}, 1234.5)
    with tarfile.open(fileobj=io.BytesIO(content(archive))) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
        assert {member.mtime for member in tar.getmembers()} == {1234}
    assert members == {"a": data, "b": b"xy"}


def test_parts_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    parts = Parts((b"begin", FileSlice(tmp_path / "a", 10, 50), b"end"))
    assert content(parts) == b"begin" + bytes(range(10, 60)) + b"end"


def test_a_file_that_ends_too_early_is_an_error_and_not_a_short_answer(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(ServerFault, match="ends too early"):
        b"".join(Parts((FileSlice(tmp_path / "a", 0, 10),)).read())
