"""Products by the tiles of AMX: their plain C is what the manual specifies, and the instructions
compute the same: those of the processor where it has them, else those of the compiled library under
an emulator."""

import ctypes as c
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tinkercloud.config import c_compiler
from tinkercloud.embedded.native import build, compiler
from tinkercloud.embedded.native.instruction_sets import (
    AMX,
    AMX_EMULATED,
    AVX512_BF16,
    InstructionSet,
    processor_features,
    processor_sets,
)
from tinkercloud.embedded.native.structures import Packing

pytestmark = pytest.mark.skipif(c_compiler() is None, reason="there is no C compiler")

HERE = processor_sets(processor_features())
TILE_INPUTS, TILES_OF_CHAIN = 32, 64
Floats = NDArray[np.float32]


def compiled(chosen: InstructionSet) -> Path:
    """Skips where the compiler does not know it yet."""
    command = c_compiler() or ""
    trial = (command, *chosen.flags, "-E", "-x", "c", "/dev/null")
    if subprocess.run(trial, capture_output=True).returncode:
        pytest.skip(f"{command} does not know {chosen.name}")
    return build.compiled(chosen, command, compiler.user_cache_dir())


class Products:
    """A library's products in bfloat16, on one thread."""

    def __init__(self, library: c.CDLL) -> None:
        self._library = library
        library.team_new.restype = c.c_void_p
        self._team = c.c_void_p(library.team_new(1))

    def end(self) -> None:
        self._library.team_end(self._team)

    def __call__(self, x: Floats, weight: Floats) -> Floats:
        """x (M, K) and weight (N, K), rounded to bfloat16: (M, N)."""
        (rows, k), out = x.shape, len(weight)
        panels, inputs = -(-out // 16), -(-k // TILE_INPUTS) * TILE_INPUTS
        narrow, packed = bits(weight), np.zeros((panels, inputs, 16), np.uint16)
        y = np.full((rows, out), np.nan, np.float32)
        matrix = (1, out, k, inputs)
        packing = Packing(matrix, narrow.ctypes.data, packed.ctypes.data)
        self._library.pack(self._team, c.byref(packing), c.c_int64(1))
        wide = np.ascontiguousarray(x)
        arguments = (address(packed), c.c_int64(rows), address(wide), None, address(y))
        assert self._library.product(self._team, *map(c.c_int64, matrix), *arguments) == 0
        return y


def address(array: NDArray) -> c.c_void_p:
    return c.c_void_p(array.ctypes.data)


def bits(x: Floats) -> NDArray[np.uint16]:
    return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy().copy()


def products_by(chosen: InstructionSet) -> Iterator[Products]:
    """Skips where they cannot be computed so."""
    if chosen is AMX and AMX not in compiler.usable_sets():  # which asks the system for the tiles
        pytest.skip("this processor has no AMX")
    products = Products(c.CDLL(str(compiled(chosen))))
    yield products
    products.end()


@pytest.fixture(scope="module", params=(AMX_EMULATED, AMX), ids=lambda chosen: chosen.name)
def tiles(request: pytest.FixtureRequest) -> Iterator[Products]:
    """In plain C, and by the instructions."""
    yield from products_by(request.param)


@pytest.fixture(scope="module")
def emulated() -> Iterator[Products]:
    yield from products_by(AMX_EMULATED)


@pytest.fixture(scope="module")
def processor() -> Iterator[Products]:
    yield from products_by(AMX)


def numbers(rows: int, columns: int, scale: float = 1.0) -> Floats:
    """Bfloat16 ones."""
    generator = np.random.default_rng(rows * 1000 + columns)
    wide = generator.standard_normal((rows, columns), np.float32) * np.float32(scale)
    return torch.from_numpy(wide).bfloat16().float().numpy()


# ---- the specification, in fractions


def float32(exact: Fraction) -> Fraction:
    """To the nearest, to the even one of two; a denormal is zero."""
    if not exact:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit
    return rounded if abs(rounded) >= Fraction(2) ** -126 else Fraction(0)


def fractions(row: Floats) -> list[Fraction]:
    """With zeros up to a whole tile; denormals are zero."""
    found = [Fraction(float(x)) if abs(x) >= 2.0**-126 else Fraction(0) for x in row]
    return found + [Fraction(0)] * (-len(found) % TILE_INPUTS)


def specified_dot(x: list[Fraction], w: list[Fraction], total: Fraction) -> Fraction:
    """TDPBF16PS, of one row and one output."""
    even = odd = Fraction(0)
    for k in range(0, len(x), 2):
        even = float32(even + x[k] * w[k])
        odd = float32(odd + x[k + 1] * w[k + 1])
    return float32(total + float32(even + odd))


def specified_output(x: list[Fraction], w: list[Fraction]) -> np.float32:
    """Chains of 64 tiles, and these one after the other."""
    total, size = None, TILE_INPUTS * TILES_OF_CHAIN
    for first in range(0, len(x), size):
        chain = Fraction(0)
        for i in range(first, min(first + size, len(x)), TILE_INPUTS):
            chain = specified_dot(x[i : i + TILE_INPUTS], w[i : i + TILE_INPUTS], chain)
        block = np.float32(float(chain))
        total = block if total is None else np.float32(total + block)
    assert total is not None
    return total


def specified(x: Floats, weight: Floats) -> Floats:
    rows, outputs = [fractions(row) for row in x], [fractions(row) for row in weight]
    return np.array([[specified_output(row, w) for w in outputs] for row in rows], np.float32)


SIZES = ((1, 1, 1), (2, 17, 33), (17, 16, 64), (33, 5, 40), (3, 10, 300), (4, 83, 31), (2, 3, 4200))


@pytest.mark.parametrize("size", SIZES)
def test_products_are_the_specification_to_the_last_bit(tiles: Products, size) -> None:
    rows, outputs, inputs = size
    x, weight = numbers(rows, inputs), numbers(outputs, inputs)
    assert np.array_equal(tiles(x, weight), specified(x, weight))


@pytest.mark.parametrize("scale", [2.0**-63, 2.0**-64])
def test_denormals_are_zero_in_sums_and_inputs(tiles: Products, scale: float) -> None:
    x, weight = numbers(5, 70, scale), numbers(9, 70, 2.0**-62)
    x[:, ::3] = 2.0**-130
    weight[:, ::3] = 2.0**100
    expected = specified(x, weight)
    assert np.array_equal(tiles(x, weight), expected)
    assert expected.any()


def test_sums_of_mixed_magnitudes_are_rounded_as_specified(tiles: Products) -> None:
    x, weight = numbers(4, 200), numbers(6, 200)
    x *= np.float32(2.0) ** np.random.default_rng(0).integers(-40, 40, x.shape)
    assert np.array_equal(tiles(x, weight), specified(x, weight))


@pytest.mark.parametrize("outputs", [1, 40, 83])
@pytest.mark.parametrize("inputs", [32, 300, 2100])
def test_a_row_has_the_same_bits_beside_any_number_of_others(
    tiles: Products, outputs: int, inputs: int
) -> None:
    x, weight = numbers(130, inputs), numbers(outputs, inputs)
    expected = tiles(x, weight)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(expected - exact).max() < 1e-4
    for rows in (*range(1, 34), 48, 49, 65, 128, 129):
        assert np.array_equal(tiles(x[-rows:], weight), expected[-rows:]), f"{rows} rows"


# ---- the instructions

TRAPPED = """
import ctypes, sys
traps, kernels = map(ctypes.CDLL, sys.argv[1:])
traps.trap_amx()
answer = kernels.check_amx()
print(answer, ctypes.c_long.in_dll(traps, "trapped_dots").value > 0)
"""


@pytest.mark.skipif(AVX512_BF16 not in HERE, reason="the rest of the library needs AVX-512")
@pytest.mark.skipif(AMX in HERE, reason="this processor has the instructions")
def test_the_compiled_instructions_compute_what_the_plain_c_does(tmp_path: Path) -> None:
    traps = tmp_path / "traps.so"
    source = Path(__file__).with_name("amx_traps.c")
    flags = ("-O2", "-shared", "-fPIC", f"-I{build.KERNELS}", "-o", str(traps))
    subprocess.run([c_compiler() or "", *flags, str(source), "-lm"], check=True)
    command = [sys.executable, "-c", TRAPPED, str(traps), str(compiled(AMX))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "2 True\n", done.stderr


@pytest.mark.skipif(AMX not in HERE, reason="this processor has no AMX")
def test_the_processor_computes_what_the_plain_c_does() -> None:
    assert AMX in compiler.usable_sets()  # which asks the system for the tiles
    assert c.CDLL(str(compiled(AMX))).check_amx() == 2


def magnitudes(generator: np.random.Generator, size: tuple[int, int], name: str) -> Floats:
    """Bfloat16 numbers: of exponents that are near each other, far apart, at both ends, or any bits
    that are a number."""
    if name == "any bits":
        wide = (generator.integers(0, 2**16, size, np.uint32) << 16).view(np.float32)
        return np.where(np.isfinite(wide), wide, np.float32(1))
    first, end = EXPONENTS[name]
    wide = generator.standard_normal(size) * 2.0 ** generator.integers(first, end, size)
    return torch.from_numpy(wide).bfloat16().float().numpy()


EXPONENTS = {"near": (0, 1), "far": (-30, 30), "denormal": (-75, -55), "overflowing": (55, 64)}


@pytest.mark.parametrize("name", [*EXPONENTS, "any bits"])
def test_the_processor_has_the_bits_of_the_plain_c_whatever_the_numbers(
    processor: Products, emulated: Products, name: str
) -> None:
    generator = np.random.default_rng(7)
    for rows, outputs, inputs in generator.integers(1, (70, 120, 700), (10, 3)).tolist():
        x = magnitudes(generator, (rows, inputs), name)
        weight = magnitudes(generator, (outputs, inputs), name)
        found, expected = processor(x, weight), emulated(x, weight)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
