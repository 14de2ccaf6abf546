"""What is declared of PyTorch's products is true on this processor; what builds on it follows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product as pairs
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tests.embedded import float64_decoder
from tests.embedded.tiny import Sampler, ask, random_prompt, same
from tinkercloud.core.types import FromBase, SampleOutput
from tinkercloud.embedded.forward.row_invariance import (
    ROW_TILE,
    Product,
    has_equal_rows,
    is_row_invariant,
    log_row_invariance,
)
from tinkercloud.embedded.forward.runners import GraphRunner, TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, speculate
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import base_states
from tinkercloud.embedded.sampling.engine import SamplingEngine

# K and N: short and long sums, ranks of adapters, sizes of layers, some of no whole vector.
INPUTS = (8, 16, 48, 192, 384, 576, 900, 1536, 2048)
OUTPUTS = (8, 32, 96, 576, 1000, 1536)
COUNTS = (8, 16, 24, 32, 40, 56, 64, 96, 136, 256)
MOST_ROWS = 328


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def uneven(differs: Callable[[int, int], bool]) -> Product:
    """A product that cuts its sums in two where `differs` of the numbers of rows and inputs."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        if not differs(*x.shape):
            return F.linear(x, weight, bias)
        cut = x.shape[1] // 2
        return F.linear(x[:, :cut], weight[:, :cut], bias) + F.linear(x[:, cut:], weight[:, cut:])

    return product


# ---- the declaration


SHAPES = tuple(pairs(INPUTS, OUTPUTS))


def uneven_shapes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Those whose products are not row-invariant, the first rows or the last."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for inputs, outputs in shapes:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        for way in (weight, weight.t()):  # forward and backward
            x = torch.randn(MOST_ROWS, way.shape[1], generator=generator).to(dtype)
            whole = F.linear(x, way)
            first = [torch.equal(F.linear(x[:count], way), whole[:count]) for count in COUNTS]
            if not (all(first) and has_equal_rows(F.linear, x, way, COUNTS)):
                found.append(tuple(way.shape))
    return found


def test_products_that_are_declared_row_invariant_are_so(
    dtype: torch.dtype, num_threads: int
) -> None:
    """In some shapes, other ones for another number of threads: all take minutes in bfloat16 on a
    processor that does not multiply it."""
    if is_row_invariant(dtype):
        assert uneven_shapes(SHAPES[num_threads::27], dtype) == []


@pytest.mark.slow
def test_products_are_declared_row_invariant_where_they_are_so_in_every_shape(
    dtype: torch.dtype, num_threads: int
) -> None:
    assert is_row_invariant(dtype) == (uneven_shapes(SHAPES, dtype) == [])


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param(lambda rows, _: rows == ROW_TILE, id="one tile"),
        pytest.param(lambda rows, _: rows % 16 == 8, id="half of two tiles"),
        pytest.param(lambda rows, _: rows >= 128, id="many rows"),
        pytest.param(lambda rows, inputs: rows < 32 and inputs > 1000, id="long sums"),
    ],
)
def test_products_whose_rounding_depends_on_the_number_of_rows_are_not_declared_row_invariant(
    dtype: torch.dtype, differs: Callable[[int, int], bool]
) -> None:
    assert not is_row_invariant(dtype, uneven(differs))


def test_the_verdict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    verdicts = {True: "row-invariant", False: "not row-invariant"}
    with caplog.at_level("INFO"):
        log_row_invariance(torch.bfloat16)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        assert f"{name}: {verdicts[is_row_invariant(dtype)]}" in caplog.text


# ---- what follows from it

PROMPT = random_prompt(40, 0)
REQUEST = ask(PROMPT, max_tokens=40, seed=5, use_eos=False)


@pytest.fixture
def uneven_store(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """Samples of it go through products that are not row-invariant."""
    by_tiles = uneven(lambda rows, _: rows % 16 == ROW_TILE)
    monkeypatch.setattr(base_states, "runner_for", lambda base, threads: TorchRunner(by_tiles))
    return store


def among_others(store: ModelStore, version: str) -> SampleOutput:
    others = {str(i): (version, replace(REQUEST, prompt=np.array([i], np.int32))) for i in range(9)}
    return Sampler(store).run({**others, "asked": (version, REQUEST)})["asked"]


def logprobs_of(output: SampleOutput) -> NDArray[np.float32]:
    return output.sequences[0].logprobs


def test_where_products_are_declared_row_invariant_other_rows_change_no_bit(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = TorchRunner()
    if not runner.is_row_invariant(store.base("tiny")):
        pytest.skip("PyTorch's products are not row-invariant on this processor")
    monkeypatch.setattr(base_states, "runner_for", lambda base, threads: runner)
    base = store.publish(FromBase("tiny"))
    same(Sampler(store).one(base, REQUEST), among_others(store, base))


def test_where_they_are_not_company_changes_bits_and_results_are_right_up_to_rounding(
    uneven_store: ModelStore,
) -> None:
    base = uneven_store.publish(FromBase("tiny"))
    alone, among = Sampler(uneven_store).one(base, REQUEST), among_others(uneven_store, base)
    assert not np.array_equal(logprobs_of(alone), logprobs_of(among))
    for output in (alone, among):
        tokens = output.sequences[0].tokens.tolist()
        exact = float64_decoder.logits(uneven_store.version(base), [*PROMPT, *tokens])
        near = 2 * float64_decoder.rounding_of(uneven_store.version(base), exact)
        drawn = exact.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])
        error = (torch.from_numpy(logprobs_of(output)).double() - drawn[:, 0]).abs()
        assert (error <= near[len(PROMPT) - 1 : -1]).all()


def test_where_they_are_not_no_keys_are_used_again(uneven_store: ModelStore) -> None:
    base, sampler = uneven_store.publish(FromBase("tiny")), Sampler(uneven_store)
    outputs = [sampler.one(base, REQUEST) for _ in range(2)]
    assert [output.prompt_cache_hit_tokens for output in outputs] == [0, 0]
    same(*outputs)


def test_where_they_are_not_nothing_is_drafted_unless_asked_for(
    uneven_store: ModelStore, tmp_path: Path
) -> None:
    auto = speculate(DrafterSettings("auto", None, 1, tmp_path, tmp_path))
    base, sampler = uneven_store.publish(FromBase("tiny")), Sampler(uneven_store)
    sampler.engine = SamplingEngine(max_batch=8, kv_cache_bytes=2**20, speculate=auto)
    sampler.one(base, REQUEST)
    assert sampler.engine.speculation() == ({}, [])


def test_a_gpu_promises_no_row_invariance(llama: BaseModel) -> None:
    assert not TorchRunner().is_row_invariant(replace(llama, device=torch.device("cuda")))
    assert not GraphRunner(None).is_row_invariant(llama)
