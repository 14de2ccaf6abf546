"""Log-probabilities sharded over gloo ranks, against torch on full tensors."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tinkercloud.cluster.training import packing
from tinkercloud.cluster.training.logprobs import chunked_logprobs, gather_rows, target_logprobs

VOCAB, ROWS, TARGETS, HIDDEN = 21, 12, 3, 8


def on_ranks(world: int, check: Callable[[int], None]) -> None:
    """Run check(rank) in `world` processes joined by gloo; a failure of any fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        args = (world, str(Path(folder) / "rendezvous"), check)
        if world == 1:
            _enter(0, *args)
        else:
            torch.multiprocessing.spawn(_enter, args, world)


def _enter(rank: int, world: int, rendezvous: str, check: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world)
    try:
        check(rank)
    finally:
        dist.destroy_process_group()


def whole_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits (n, V) leaf, targets (n, K), weights (n, K), expected logprobs with gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(ROWS, VOCAB, generator=generator)).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS, TARGETS), generator=generator)
    weights = torch.randn(ROWS, TARGETS, generator=generator)
    return logits, targets, weights, torch.log_softmax(logits, -1).gather(1, targets)


def compare_with_log_softmax(rank: int, world: int, width: int) -> None:
    logits, targets, weights, expected = whole_problem()
    (expected * weights).sum().backward()
    padded = torch.full((ROWS, world * width), 1e4)  # padding that would win a softmax
    padded[:, :VOCAB] = logits.detach()
    columns = slice(rank * width, (rank + 1) * width)
    own = padded[:, columns].clone().requires_grad_()
    found = target_logprobs(own, targets, VOCAB, dist.group.WORLD)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    gradient = torch.zeros(ROWS, world * width)
    gradient[:, :VOCAB] = logits.grad
    torch.testing.assert_close(own.grad, gradient[:, columns], rtol=0, atol=3e-6)


@pytest.mark.parametrize(("world", "width"), [(1, 21), (1, 32), (2, 11), (2, 32)])
def test_values_and_gradients_equal_those_of_log_softmax(world: int, width: int) -> None:
    """width: columns per rank; with 32 of them the second rank holds only padding."""
    on_ranks(world, partial(compare_with_log_softmax, world=world, width=width))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    def check(rank: int) -> None:
        logits, targets, _, _ = whole_problem()
        rounded = logits.detach().bfloat16()
        found = target_logprobs(rounded, targets, VOCAB, dist.group.WORLD)
        expected = torch.log_softmax(rounded.float(), -1).gather(1, targets)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)

    on_ranks(1, check)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
def test_chunks_change_neither_values_nor_gradients(parts: int, chunk: int) -> None:
    """parts 2: an unembed that gathers another rank's rows, as sequence parallelism does."""

    def check(rank: int) -> None:
        torch.manual_seed(1)
        weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
        full = torch.randn(ROWS, HIDDEN, requires_grad=True)
        _, targets, weights, _ = whole_problem()

        def unembed(own: torch.Tensor) -> torch.Tensor:
            others = [own]
            if parts == 2:
                start = own.storage_offset() // HIDDEN + ROWS // 2
                others.append(full[start : start + len(own)])
            return torch.cat(others) @ weight.T

        def logprobs(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return target_logprobs(logits, wanted, VOCAB, dist.group.WORLD)

        expected = torch.log_softmax(full @ weight.T, -1).gather(1, targets)
        wanted = torch.autograd.grad((expected * weights).sum(), (weight, full))
        found = chunked_logprobs(full[: ROWS // parts], targets, unembed, logprobs, chunk)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        gradients = torch.autograd.grad((found * weights).sum(), (weight, full))
        for ours, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

    on_ranks(1, check)


def test_all_logits_are_never_in_memory_at_once() -> None:
    def check(rank: int) -> None:
        weight = torch.randn(500, HIDDEN, requires_grad=True)
        hidden = torch.randn(200, HIDDEN, requires_grad=True)
        targets = torch.zeros(200, 1, dtype=torch.int64)

        def logprobs(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return target_logprobs(logits, wanted, 500, dist.group.WORLD)

        with _LargestTensor() as largest:
            chunked_logprobs(hidden, targets, lambda x: x @ weight.T, logprobs, 10).sum().backward()
        assert largest.numel <= 10 * 500

    on_ranks(1, check)


def compare_gathered_rows(rank: int, world: int) -> None:
    cuts = [packing.zigzag([8, 4, 12], world, r) for r in range(world)]
    order = torch.from_numpy(np.concatenate(cuts))
    full = torch.randn(24, 2, generator=torch.Generator().manual_seed(3))
    own = full[cuts[rank]].clone().requires_grad_()
    found = gather_rows(own, order, dist.group.WORLD)
    assert torch.equal(found, full)
    weights = torch.arange(48.0).view(24, 2)
    (found * weights).sum().backward()
    assert torch.equal(own.grad, weights[cuts[rank]])


def test_context_parallel_rows_are_gathered_in_order_and_the_gradient_is_of_the_local_rows() -> (
    None
):
    on_ranks(2, partial(compare_gathered_rows, world=2))
