"""Weights moved to large pages are the same weights."""

import re
from pathlib import Path

import pytest
import torch

from tinkercloud.embedded.model.huge_pages import LINE_BYTES, PAGE_BYTES, in_huge_pages
from tinkercloud.embedded.training.linear import join_weights, joined

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of odd sizes; a head that is the embedding, a row apart, a matrix turned around."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"embed": (33, 7), "q": (5, 7), "k": (3, 7), "norm": (7,), "nothing": (0,)}
    weights = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    return {
        **weights,
        "head": weights["embed"],
        "a row": weights["embed"][4],
        "turned": weights["q"].T,
    }


def test_values_and_shapes_stay(weights: dict[str, torch.Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in weights.items()}
    places = {name: tensor.data_ptr() for name, tensor in weights.items()}
    in_huge_pages(weights)
    assert list(weights) == list(before)
    for name, tensor in weights.items():
        assert tensor.dtype == before[name].dtype
        assert tensor.stride() == before[name].stride()
        assert torch.equal(tensor, before[name])
        assert tensor.data_ptr() != places[name] or not tensor.numel()


def test_tensors_that_shared_memory_still_do(weights: dict[str, torch.Tensor]) -> None:
    in_huge_pages(weights)
    weights["embed"][4] = 1.0
    weights["q"][2, 3] = 2.0
    assert torch.equal(weights["head"], weights["embed"])
    assert weights["a row"].eq(1.0).all()
    assert weights["turned"][3, 2] == 2.0
    assert not weights["k"].eq(2.0).any()


def test_joined_matrices_stay_joined(weights: dict[str, torch.Tensor]) -> None:
    del weights["turned"]
    join_weights(weights, [("q", "k")])
    in_huge_pages(weights)
    whole = joined([weights["q"], weights["k"]])
    assert whole is not None
    assert torch.equal(whole, torch.cat([weights["q"], weights["k"]]))
    assert joined([weights["embed"], weights["k"]]) is None


def test_addresses_are_aligned(weights: dict[str, torch.Tensor]) -> None:
    in_huge_pages(weights)
    for name in ("embed", "q", "k", "norm"):
        assert weights[name].data_ptr() % LINE_BYTES == 0
    assert weights["embed"].data_ptr() % PAGE_BYTES == 0


@pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="this system has no large pages"
)
def test_the_system_gives_large_pages() -> None:
    weights = {"w": torch.ones(64 * PAGE_BYTES // 4)}
    in_huge_pages(weights)
    start = weights["w"].data_ptr()
    area = _area_of(start)
    [kilobytes] = re.findall(r"AnonHugePages:\s+(\d+) kB", area)
    large = int(kilobytes) * 1024
    if not large:
        pytest.skip("no large page is free")
    assert large >= 32 * PAGE_BYTES


def _area_of(address: int) -> str:
    """What /proc/self/smaps says of the mapping that holds it."""
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, end = (int(address, 16) for address in area.split(" ", 1)[0].split("-"))
        if first <= address < end:
            return area
    raise AssertionError("no mapping holds the weights")
