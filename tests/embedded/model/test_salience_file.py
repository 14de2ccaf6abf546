"""What is chosen once for a base model is read at the next start, and only for that model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.embedded.tiny import write_tiny_model
from tinkercloud.embedded.model import salience_file
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(salience_file, "FEWEST_BYTES", 0)
    monkeypatch.setattr(salience_file, "user_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def salient(folder: Path, seed: int = 0) -> dict[str, list[int]]:
    folder.mkdir(exist_ok=True)
    write_tiny_model(folder, seed)
    base = BaseModel.load("tiny", folder, None, torch.bfloat16, torch.device("cpu"))
    assert isinstance(base.weights, PackedTensors)
    return {name: inputs.tolist() for name, inputs in base.weights.salient_inputs.items()}


def refuse(*_: object) -> dict[str, Tensor]:
    raise AssertionError("chosen again")


def test_a_second_start_reads_what_the_first_one_chose(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = salient(tmp_path / "model")
    monkeypatch.setattr("tinkercloud.embedded.model.base_model.salient_inputs", refuse)
    assert salient(tmp_path / "elsewhere") == chosen
    with pytest.raises(AssertionError, match="chosen again"):
        salient(tmp_path / "other", seed=1)


def test_a_damaged_file_is_made_again(cache: Path, tmp_path: Path) -> None:
    chosen = salient(tmp_path / "model")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert salient(tmp_path / "model") == chosen
    assert file.read_bytes() == whole


def test_where_nothing_can_be_kept_it_is_chosen_each_time(cache: Path, tmp_path: Path) -> None:
    cache.write_text("not a folder")
    assert salient(tmp_path / "model") == salient(tmp_path / "model")


def test_small_models_leave_no_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salience_file, "FEWEST_BYTES", 2**26)
    salient(tmp_path / "model")
    assert not cache.exists()
