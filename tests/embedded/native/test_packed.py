"""Products with packed weights: right, and a row's bits are its own."""

import ctypes as c
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tinkercloud.config import c_compiler
from tinkercloud.embedded.native import compiler, packed
from tinkercloud.embedded.native.build import KERNELS
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.team import Team

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

# Inputs: one, odd ones, whole blocks of 32 and not, cut in two and in three chunks. Outputs: few
# rows take up to eight panels of 16 at once, and then what is left.
SIZES = (
    *((1, 1), (3, 7), (16, 32), (30, 75), (67, 576), (48, 800), (129, 1999), (20, 2560)),
    *((190, 40), (215, 40), (240, 40), (400, 40)),
)


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(found: Tensor, exact: Tensor, num_terms: int) -> None:
    error = float((found.double() - exact).abs().max())
    assert error <= 2e-6 * num_terms**0.5 + 3e-5  # one chain over all terms would be beyond it


@pytest.mark.parametrize("shape", SIZES)
def test_what_is_packed_is_unpacked_to_the_same_bits(team: Team, dtype: torch.dtype, shape):
    weight = matrix(shape, dtype)
    assert torch.equal(packed.unpack(team, packed.pack(team, weight)), weight)


def test_many_are_packed_in_one_call_as_each_by_itself(team: Team):
    """Of both types, and some without outputs."""
    shapes = ((16, 40), (1, 1), (49, 16), (0, 8), (300, 33), (0, 5))
    weights = [matrix(s, d) for s in shapes for d in (torch.float32, torch.bfloat16)]
    found = packed.pack_all(team, weights)
    for each, weight in zip(found, weights, strict=True):
        assert each.dtype == weight.dtype
        assert torch.equal(each.packed, packed.pack(team, weight).packed)
        assert torch.equal(packed.unpack(team, each), weight)
    assert packed.pack_all(team, []) == []


def with_room(team: Team, weight: Tensor, num_spare: int) -> packed.PackedMatrix:
    """In memory that is not clear."""
    shape = packed.packed_shape((weight.shape[0], weight.shape[1]), weight.dtype, num_spare)
    return packed.pack(team, weight, torch.full(shape, torch.nan, dtype=weight.dtype))


def test_weights_of_some_inputs_are_there_once_more(team: Team):
    weight = matrix((67, 75), torch.bfloat16)
    inputs = torch.tensor([0, 1, 17, 40, 74])
    weights = with_room(team, weight, 40)
    assert weights.width == 96 + 64
    weights.repeat(inputs)
    assert torch.equal(packed.unpack(team, weights), weight)
    read = packed.unpack(team, packed.PackedMatrix(weights.packed, (67, 160)))
    assert torch.equal(read[:, 96:101], weight[:, inputs])
    assert not read[:, 75:96].any()
    assert not read[:, 101:].any()


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_a_product_by_itself_reads_nothing_of_spare_inputs(team: Team, rows: int):
    weight, x = matrix((67, 75), torch.bfloat16), matrix((rows, 75), torch.float32)
    weights = with_room(team, weight, 32)
    weights.repeat(torch.arange(32))
    expected = packed.product(team, x, packed.pack(team, weight))
    assert torch.equal(packed.product(team, x, weights), expected)


def test_packed_weights_lie_by_panels_of_16_outputs(team: Team):
    weight = matrix((40, 70), torch.float32)
    wide = packed.pack(team, weight).packed
    assert wide.shape == (3, 70, 16)
    assert torch.equal(wide[1, 5], weight[16:32, 5])
    assert not wide[2, :, 8:].any()
    narrow = packed.pack(team, weight.bfloat16()).packed
    assert narrow.shape == (3, 48, 16, 2)
    assert torch.equal(narrow[1, 5], weight[16:32, 10:12].bfloat16())
    assert not narrow[:, 35:].any()


@pytest.mark.parametrize("shape", SIZES)
def test_a_row_has_the_same_bits_beside_any_number_of_others(team: Team, dtype, shape):
    weight, x = matrix(shape, dtype), matrix((203, shape[1]), torch.float32)
    bias = torch.arange(shape[0]).float()
    weights = packed.pack(team, weight)
    alone = torch.cat([packed.product(team, row[None], weights, bias) for row in x])
    exact = x.to(dtype).double() @ weight.double().T
    assert_near(alone - bias, exact, shape[1])
    for rows in (2, 3, 4, 5, 8, 9, 13, 47, 128, 129, 200, 203):
        together = packed.product(team, x[:rows].contiguous(), weights, bias)
        assert torch.equal(together, alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-64], ids=["usual", "some sums below 2^-126"])
def test_both_forms_of_sums_of_pairs_have_the_same_bits(
    team: Team, form_of_pairs: Callable[[int], bool], shape, scale: float
):
    weight, x = matrix(shape, torch.bfloat16) * scale, matrix((13, shape[1]), torch.float32) * scale
    weights = packed.pack(team, weight)
    if not form_of_pairs(0):
        pytest.skip("the processor multiplies no pairs, or all of them as tiles")
    by_pairs = packed.product(team, x, weights)
    form_of_pairs(1)
    assert torch.equal(packed.product(team, x, weights), by_pairs)


def test_threads_change_no_bit(team: Team, dtype: torch.dtype):
    weight, x = matrix((300, 600), dtype), matrix((70, 600), torch.float32)
    weights, alone = packed.pack(team, weight), Team(1)
    expected = packed.product(team, x, weights)
    assert torch.equal(packed.product(alone, x, weights), expected)
    alone.end()


def test_zeros_beyond_the_inputs_change_no_bit(team: Team, dtype: torch.dtype):
    weight, x = matrix((40, 70), dtype), matrix((9, 70), torch.float32)
    longer, longer_x = (torch.nn.functional.pad(t, (0, 58)) for t in (weight, x))
    expected = packed.product(team, x, packed.pack(team, weight))
    assert torch.equal(packed.product(team, longer_x, packed.pack(team, longer)), expected)


# ---- the number type

SHIM = r"""
#include "narrow.h"

void rounded(float *x, int64_t count, uint16_t *out) { round_to_narrow(x, count, out); }
"""


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    folder = tmp_path_factory.mktemp("rounding")
    (folder / "shim.c").write_text(SHIM)
    flags = (*compiler.flags_in_use(), "-shared", f"-I{KERNELS}")
    command = [c_compiler() or "", *flags, "shim.c", "-o", "rounding.so"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return c.CDLL(str(folder / "rounding.so"))


def test_rounding_to_bfloat16_is_that_of_torch(rounding: c.CDLL):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    x = np.concatenate([bits, ties, np.uint32([0, 0x80000000, 0x7F800000, 0x7F7FFFFF])])
    x = x.view(np.float32)
    x = x[~np.isnan(x)]
    expected = torch.from_numpy(x).bfloat16()
    found, widened = np.zeros(len(x), np.uint16), x.copy()
    addresses = (c.c_void_p(widened.ctypes.data), c.c_void_p(found.ctypes.data))
    rounding.rounded(addresses[0], c.c_int64(len(x)), addresses[1])
    assert np.array_equal(found, expected.view(torch.uint16).numpy())
    assert np.array_equal(widened.view(np.uint32), expected.float().numpy().view(np.uint32))
