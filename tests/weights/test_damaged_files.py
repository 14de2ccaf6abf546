"""Damaged GGUF and safetensors files: each is read, or refused by name, and little memory taken."""

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.architectures.networks import random_network, write_gguf
from tests.embedded.tiny import write_tiny_model
from tests.fuzzing import fuzzing
from tests.peak_memory import PeakMemory
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import ConfigError, UserError
from tinkercloud.weights.adapters import fresh_adapter, load_adapter, save_adapter
from tinkercloud.weights.checkpoints import read_tensors
from tinkercloud.weights.loader import check_tensors, read_config, read_model
from tinkercloud.weights.peft_import import import_adapter

FEW, MANY = 60, 5000
LONGEST_S = 5.0  # of this process alone: others may be computing too
MOST_BYTES = 300 * 1024**2
CPU = torch.device("cpu")
# What parsers go wrong by: none, all of an integer's range, and what multiplies to more.
INTEGERS = [0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

Damage = Callable[[bytes], bytes]


def _at(place: float, body: bytes, length: int) -> int:
    """Most places are in the first bytes, which say what the others mean."""
    end = max(1, len(body) - length)
    return min(int(place**3 * end), end - 1)


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """One to four changes of a file's bytes."""
    place = st.floats(0, 1, exclude_max=True)
    integers = st.sampled_from(INTEGERS).map(lambda number: struct.pack("<Q", number))
    written = st.one_of(st.binary(min_size=1, max_size=4), integers, integers.map(lambda b: b[:4]))
    kinds = st.sampled_from(["write", "insert", "remove", "cut", "repeat"])
    changes = draw(st.lists(st.tuples(kinds, place, written), min_size=1, max_size=4))

    def damage(body: bytes) -> bytes:
        for kind, where, piece in changes:
            start = _at(where, body, len(piece))
            head, tail = body[:start], body[start:]
            body = {
                "write": head + piece + tail[len(piece) :],
                "insert": head + piece + tail,
                "remove": head + tail[len(piece) :],
                "cut": body[: int(where * len(body))],
                "repeat": head + tail[: 8 * len(piece)] + tail,
            }[kind]
        return body

    return damage


def read_whole(path: Path) -> None:
    config, tensors = read_model(path, torch.float32)
    assert {name for name, _ in tensors} <= config.weight_shapes().keys()


def check_damaged(path: Path, read: Callable[[], object], num_examples: int) -> None:
    """What raises anything but `errors`, takes long or takes much memory, fails."""
    read()
    whole = path.read_bytes()
    peak = PeakMemory()

    @fuzzing(num_examples, repeats=num_examples == FEW)
    @given(damages())
    def check(damage: Damage) -> None:
        path.unlink()  # else a map of the last one would be cut
        path.write_bytes(damage(whole))
        begun = time.process_time()
        with peak.measured():
            try:
                read()
            except (ConfigError, UserError) as error:
                assert str(error)
        assert time.process_time() - begun < LONGEST_S

    check()
    assert peak.num_bytes < MOST_BYTES


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def num_examples(request: pytest.FixtureRequest) -> int:
    return request.param


def test_a_damaged_gguf_file_is_read_or_refused(tmp_path: Path, num_examples: int) -> None:
    path = write_gguf(random_network("Llama"), tmp_path / "model.gguf", Kind.Q8_0)
    check_damaged(path, lambda: (check_tensors(path), read_whole(path)), num_examples)


def test_damaged_safetensors_of_a_model_are_read_or_refused(
    tmp_path: Path, num_examples: int
) -> None:
    random_network("Llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    check_damaged(path, lambda: (check_tensors(tmp_path), read_whole(tmp_path)), num_examples)


def test_a_damaged_adapter_is_read_or_refused(tmp_path: Path, num_examples: int) -> None:
    base = write_tiny_model(tmp_path / "base")
    spec, shapes = LoraSpec(4, 0), read_config(base).linear_shapes()
    save_adapter(fresh_adapter(spec, shapes, CPU), spec, "base", tmp_path)

    def read() -> None:
        first: UserError | None = None
        try:
            load_adapter(tmp_path, spec, shapes, CPU)
        except UserError as error:
            first = error
        import_adapter(tmp_path, base)
        if first is not None:
            raise first

    check_damaged(tmp_path / "adapter_model.safetensors", read, num_examples)


def test_damaged_moments_of_a_checkpoint_are_read_or_refused(
    tmp_path: Path, num_examples: int
) -> None:
    path = tmp_path / "optimizer.safetensors"
    save_file({f"exp_avg.{i}": torch.ones(3, 5) for i in range(4)}, path)
    check_damaged(path, lambda: read_tensors(path), num_examples)
