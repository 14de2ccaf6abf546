"""The YAML of a pool: what is read, and what is refused with a sentence that says what to do."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzzing
from tinkercloud.errors import ConfigError
from tinkercloud.pool.pool_file import load_pool, parse_pool, pool_text
from tinkercloud.pool.sizes import parse_size, size_text

MODEL = {"name": "m", "path": "m.gguf"}
WORKER = {"name": "a", "start": "local"}


def parsed(**parts: Any):
    return parse_pool({"models": [MODEL], **parts}, Path("/pool"))


def test_a_short_file_has_defaults_and_paths_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    text = "workers: [{name: laptop, host: ada@laptop}]\nmodels: [{name: m, path: m.gguf}]"
    path.write_text(text)
    pool = load_pool(path)
    assert pool.model(None).path == tmp_path / "m.gguf"
    assert pool.workers[0].start == "ssh"
    assert [gpu.device for gpu in pool.workers[0].gpus] == ["CPU"]
    assert pool.coordinator.host == "127.0.0.1"


def test_what_is_written_is_read_to_the_same_pool(tmp_path: Path) -> None:
    gpus = [{"device": "CUDA0", "memory": "8GiB"}, {"device": "Vulkan0", "memory": 2**30}]
    pool = parsed(
        coordinator={"port": 9000, "memory": "4GB"},
        workers=[WORKER | {"gpus": gpus}],
        models=[
            MODEL | {"tensor_split": [3, 1], "draft": "suffix"},
            MODEL | {"name": "b", "draft": "small.gguf", "drafted_tokens": 32},
        ],
    )
    assert [model.draft for model in pool.models] == ["suffix", Path("/pool/small.gguf")]
    path = tmp_path / "pool.yaml"
    path.write_text(pool_text(pool))
    assert load_pool(path) == pool


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"wrokers": []}, "wrokers: there is no such setting"),
        ({"models": []}, "name one by its name"),
        ({"models": [MODEL, MODEL]}, "models have the same name"),
        ({"models": [{"name": "--model", "path": "x"}]}, "models.0.name: String should match"),
        ({"models": [MODEL | {"tensor_split": [0, 0]}]}, "give each device its share"),
        ({"workers": [WORKER | {"gpus": [{"device": "CUDA0", "memory": "much"}]}]}, "8GB"),
        ({"workers": [WORKER | {"gpus": []}]}, "leave it out for the CPU"),
        ({"workers": [WORKER | {"gpus": [{"device": "CPU"}] * 2}]}, "a device twice"),
        ({"workers": [WORKER | {"port": 65535}]}, "leaves no room"),
        ({"workers": [WORKER, WORKER | {"name": "b", "port": 50051}]}, "both a's and b's"),
        ({"workers": [WORKER | {"host": "laptop"}]}, "local is for this machine"),
        ({"workers": [{"name": "a", "host": "-oProxyCommand=x"}]}, "host: String should match"),
        ({"workers": [{"name": "a", "host": "10.0.0.2", "start": "by_hand"}]}, "Use start: ssh"),
        ({"coordinator": {"host": "0.0.0.0"}}, "name it as key_file"),
    ],
)
def test_what_cannot_work_is_refused(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parsed(**parts)
    assert sentence in str(refusal.value)


def test_an_unknown_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="it has: m"):
        parsed().model("n")


def test_a_file_that_is_not_there_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tinkercloud pool init"):
        load_pool(tmp_path / "pool.yaml")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512", 512), (512, 512), ("8GB", 8 * 10**9), ("7.5 GiB", 7.5 * 2**30), ("64mib", 2**26)],
)
def test_sizes_are_read(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", True, "8 apples"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="write it as"):
        parse_size(text)


@fuzzing(100, repeats=True)
@given(st.integers(0, 2**50))
def test_a_size_is_read_back_within_what_its_text_shows(num_bytes: int) -> None:
    text = size_text(num_bytes).replace(" bytes", "")
    assert abs(parse_size(text) - num_bytes) <= 0.051 * max(num_bytes, 1)
