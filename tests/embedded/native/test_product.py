"""The compiled products by themselves: right, and a row's bits are its own."""

import ctypes as c
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tinkercloud.config import c_compiler
from tinkercloud.embedded.native import compiler as compiler_module

SHIM = r"""
#include "row_product.h"

/* Every column from `first` on, by tiles or, where that many rows go so, by strips. */
void product(const void *x, int64_t rows, const void *w, int64_t k, int64_t first, int64_t end,
             const float *bias, float *y, int64_t y_stride, int64_t strips, int64_t is_narrow) {
  float *packed = NULL;
  if (strips) {
    packed = malloc((size_t)packed_size(rows, k) * sizeof(float));
    for (int64_t s = 0; s < strips_of(rows); s++) pack_strip(x, k, rows, k, s, packed);
  }
  product_t p = {.x = x, .x_stride = k, .rows = rows, .packed = packed, .w = w,
                 .is_narrow = (int)is_narrow, .k = k, .bias = bias, .y = y, .y_stride = y_stride,
                 .scale = 1.0f};
  multiply(&p, (range_t){first, end});
  free(packed);
}

int64_t lanes(void) { return LANES; }

void rounded(float *x, int64_t count, uint16_t *out) { round_to_narrow(x, count, out); }

"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    compiler = c_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler here")
    folder = tmp_path_factory.mktemp("product")
    (folder / "shim.c").write_text(SHIM)
    include = f"-I{Path(compiler_module.__file__).parent}"
    out = folder / "product.so"
    subprocess.run(
        [compiler, *compiler_module.FLAGS, include, str(folder / "shim.c"), "-o", str(out), "-lm"],
        check=True,
        capture_output=True,
    )
    return c.CDLL(str(out))


def address(array: np.ndarray) -> c.c_void_p:
    return c.c_void_p(array.ctypes.data)


def product(
    library: c.CDLL, x: np.ndarray, w: np.ndarray, *, first: int = 0, strips: bool = False
) -> np.ndarray:
    """x w^T + the columns' numbers, from column `first` on."""
    bias = np.arange(len(w), dtype=np.float32)
    assert x.dtype == w.dtype
    y = np.zeros((len(x), len(w)), np.float32)
    shape = (c.c_int64(v) for v in (x.shape[1], first, len(w)))
    library.product(
        address(x), c.c_int64(len(x)), address(w), *shape, address(bias), address(y),
        c.c_int64(len(w)), c.c_int64(strips), c.c_int64(x.dtype == np.uint16),
    )  # fmt: skip
    return y[:, first:]


def narrow(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounded to bfloat16: its bits, and what they stand for."""
    rounded = torch.from_numpy(x).bfloat16()
    return rounded.view(torch.uint16).numpy(), rounded.float().numpy()


# Inputs: less than a vector, an odd rest, one chunk, cut in two and in three.
@pytest.mark.parametrize("k", [1, 7, 32, 75, 576, 800, 1999, 2048])
@pytest.mark.parametrize("columns", [1, 3, 8, 30, 67])
def test_a_row_has_the_same_bits_beside_any_number_of_others(library, k, columns):
    generator = np.random.default_rng(k * 100 + columns)
    x = generator.standard_normal((203, k)).astype(np.float32)
    w = generator.standard_normal((columns, k)).astype(np.float32)
    alone = np.concatenate([product(library, row[None].copy(), w) for row in x])
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + np.arange(columns)
    np.testing.assert_allclose(alone, exact, rtol=0, atol=2e-6 * np.sqrt(k) + 4e-6)
    for rows in (2, 3, 4, 5, 8, 13, 47, 48, 100, 203):
        together = product(library, x[:rows], w)
        assert np.array_equal(together, alone[:rows]), f"{rows} rows by tiles"
        if k % library.lanes() == 0:
            together = product(library, x[:rows], w, strips=True)
            assert np.array_equal(together, alone[:rows]), f"{rows} rows by strips"


@pytest.mark.parametrize("k", [1, 7, 31, 32, 75, 576, 800, 1999, 3100])
@pytest.mark.parametrize("columns", [1, 3, 8, 30, 67])
def test_a_row_in_bfloat16_has_the_same_bits_beside_any_number_of_others(library, k, columns):
    generator = np.random.default_rng(k * 100 + columns)
    x, exact_x = narrow(generator.standard_normal((203, k)).astype(np.float32))
    w, exact_w = narrow(generator.standard_normal((columns, k)).astype(np.float32))
    alone = np.concatenate([product(library, row[None].copy(), w) for row in x])
    exact = exact_x.astype(np.float64) @ exact_w.T.astype(np.float64) + np.arange(columns)
    np.testing.assert_allclose(alone, exact, rtol=0, atol=2e-6 * np.sqrt(k) + 4e-6)
    for rows in (2, 3, 4, 5, 6, 7, 8, 13, 100, 203):
        together = product(library, x[:rows], w)
        assert np.array_equal(together, alone[:rows]), f"{rows} rows"


def test_rounding_to_bfloat16_is_that_of_torch(library):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    x = np.concatenate([bits, ties, np.uint32([0, 0x80000000, 0x7F800000, 0x7F7FFFFF])])
    x = x.view(np.float32)
    x = x[~np.isnan(x)]
    expected, widened = narrow(x)
    found, rounded = np.zeros(len(x), np.uint16), x.copy()
    library.rounded(address(rounded), c.c_int64(len(x)), address(found))
    assert np.array_equal(found, expected)
    assert np.array_equal(rounded.view(np.uint32), widened.view(np.uint32))


def test_a_column_has_the_same_bits_wherever_a_call_begins(library):
    generator = np.random.default_rng(1)
    x = generator.standard_normal((60, 96)).astype(np.float32)
    w = generator.standard_normal((100, 96)).astype(np.float32)
    whole = product(library, x, w)
    for strips in (False, True):
        for first in (16, 32, 96):
            part = product(library, x, w, first=first, strips=strips)
            assert np.array_equal(part, whole[:, first:]), (first, strips)
