"""Plans of layers: properties of the split, and llama.cpp's own rule."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzzing
from tinkercloud.errors import ConfigError
from tinkercloud.pool.layer_plan import (
    Device,
    PoolTooSmall,
    balanced_counts,
    plan_layers,
    split_counts,
    unit_bytes,
)
from tinkercloud.pool.model_file import ModelFile, read_model_file
from tinkercloud.pool.pool_file import Model

MIB = 2**20
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=9)
ROOMS = st.lists(st.integers(0, 3000), min_size=1, max_size=4)


def model(**settings: object) -> Model:
    return Model.model_validate({"name": "m", "path": "m.gguf", "context": 1024, **settings})


def file(num_layers: int = 8) -> ModelFile:
    return ModelFile(
        "M", "llama", (10 * MIB,) * num_layers, 4 * MIB, 20 * MIB, 18 * MIB, (256,) * num_layers,
        vocabulary=1000, hidden=64, feed_forward=128, trained_context=2048,
        quantizations={},
    )  # fmt: skip


def devices(*memory_mib: int) -> list[Device]:
    return [Device(f"w{n}", "CPU", size * MIB, f"h:{n}") for n, size in enumerate(memory_mib)]


def every_split(num_units: int, num_devices: int) -> list[list[int]]:
    if num_devices == 1:
        return [[num_units]]
    return [
        [first, *rest]
        for first in range(num_units + 1)
        for rest in every_split(num_units - first, num_devices - 1)
    ]


def fullness(counts: list[int], units: list[int], rooms: list[int]) -> float:
    first, worst = 0, 0.0
    for count, room in zip(counts, rooms, strict=True):
        held = sum(units[first : first + count])
        first += count
        worst = max(worst, held / room if room else float("inf") if held else 0.0)
    return worst


@fuzzing(100, repeats=True)
@given(SIZES, ROOMS)
def test_a_split_is_as_even_as_the_best_of_all(units: list[int], rooms: list[int]) -> None:
    counts = balanced_counts(units, rooms)
    best = min(fullness(each, units, rooms) for each in every_split(len(units), len(rooms)))
    if counts is None:
        assert best > 1.0
    else:
        assert sum(counts) == len(units)
        assert fullness(counts, units, rooms) <= min(1.0, best + 1e-9)


@fuzzing(100, repeats=True)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_counts_given_as_a_tensor_split_come_back_from_llama_cpps_rule(counts: list[int]) -> None:
    assert split_counts([float(n) for n in counts], sum(counts)) == counts


def test_layers_follow_memory_and_none_is_lost() -> None:
    plan = plan_layers(file(), model(), devices(300, 100), 8 * MIB)
    assert [share.num_units for share in plan.shares] == [8, 1]
    assert plan.layers_text(plan.shares[0]) == "layers 0-7"
    assert plan.layers_text(plan.shares[1]) == "output"
    for share in plan.shares:
        assert share.num_bytes <= share.device.memory_bytes


def test_a_device_without_room_holds_nothing() -> None:
    plan = plan_layers(file(), model(), devices(4, 400), 8 * MIB)
    assert [share.device.owner for share in plan.shares] == ["w1"]


def test_too_little_memory_is_refused_with_the_bytes_that_are_missing() -> None:
    enough = plan_layers(file(), model(), devices(200, 100), 8 * MIB)
    assert enough.shares
    with pytest.raises(PoolTooSmall) as refusal:
        plan_layers(file(), model(), devices(50, 50), 8 * MIB)
    missing = refusal.value.missing_bytes
    assert f"{missing} bytes" in str(refusal.value)
    assert "add a worker" in str(refusal.value)
    more = devices(50, 50, missing // MIB + 60)
    assert plan_layers(file(), model(), more, 8 * MIB).shares


def test_a_tensor_split_overrides_memory_within_it() -> None:
    plan = plan_layers(file(), model(tensor_split=[1, 2]), devices(300, 300), 0)
    assert [share.num_units for share in plan.shares] == [3, 6]
    with pytest.raises(ConfigError, match="there are 2 devices: w0/CPU, w1/CPU"):
        plan_layers(file(), model(tensor_split=[1]), devices(300, 300), 0)
    with pytest.raises(PoolTooSmall, match="give it a smaller share"):
        plan_layers(file(), model(tensor_split=[1, 0]), devices(60, 300), 0)


def test_logits_on_the_coordinator_are_on_no_device() -> None:
    matrix, of_a_batch = 18 * MIB, 4 * 512 * 1000
    on_last, on_coordinator = model(), model(output="coordinator")
    freed = sum(unit_bytes(file(), on_last)) - sum(unit_bytes(file(), on_coordinator))
    assert freed == matrix + of_a_batch
    plan = plan_layers(file(), on_coordinator, devices(300, 100), 0)
    assert plan.lines()[-1].split()[:4] == ["coordinator/CPU", "logits", "20.0", "MiB"]
    lines = plan_layers(file(), on_last, devices(300, 100), 0).lines()
    assert not any(line.startswith("coordinator") for line in lines)


def test_a_smaller_cache_leaves_room() -> None:
    wide = sum(unit_bytes(file(), model(context=8192)))
    narrow = sum(unit_bytes(file(), model(context=8192, cache_type="q4_0")))
    assert wide - narrow == pytest.approx(8 * 8192 * 256 * (2 - 4.5 / 8), abs=8)


def test_smollm2_is_what_its_file_says(smollm2_gguf: Path) -> None:
    found = read_model_file(smollm2_gguf)
    assert (found.architecture, found.num_layers, found.vocabulary) == ("llama", 30, 49152)
    assert found.cache_width == (2 * 3 * 64,) * 30  # three heads of 64, keys and values
    assert 0 < smollm2_gguf.stat().st_size - (found.num_bytes - found.input_bytes) < 3 * MIB


def test_a_part_of_a_model_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"missing: m-00002-of-00002\.gguf"):
        read_model_file(path)
