"""Products of few rows by our kernels, beside the same by matrix products."""

from collections.abc import Mapping
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.embedded.forward import projection_kernels as projections
from tinkercloud.embedded.forward.adapter_bank import NO_ADAPTER, AdapterBank
from tinkercloud.embedded.model.version import Version

NAMES = ("q", "k", "v")
GATED = ("q", "gate")
OUTPUTS = {"q": 70, "k": 34, "v": 33, "gate": 70}
KINDS = (((), ()), (("q",), ("k",)), ((*OUTPUTS,), (*OUTPUTS,)))
"""Which have biases, which have adapters."""
CASES = (*product((80,), (1, 2, 16), KINDS), (1030, 1, KINDS[0]))


def largest_difference(device: torch.device, dtype: torch.dtype) -> float:
    """As a fraction of the largest number, over rows, widths, and which matrices have biases and
    adapters."""
    generator, largest = torch.Generator().manual_seed(8), 0.0

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for width, num_rows, (biased, adapted) in CASES:
        shapes = OUTPUTS.items()
        weights = {name: (random(out, width) * width**-0.5).to(dtype) for name, out in shapes}
        weights |= {f"{name}.bias": random(len(weights[name])).to(dtype) for name in biased}
        bank = bank_of(weights, adapted, device, random) if adapted else None
        slots = torch.tensor([(0, NO_ADAPTER, 1)[i % 3] for i in range(num_rows)]).int().to(device)
        x = random(num_rows, width).to(dtype)
        slotted = None if bank is None else projections.Bank(bank, slots)
        ours = [*projections.project(x, NAMES, weights, slotted)]
        ours.append(projections.project_gated(x, *GATED, weights, slotted))
        theirs = [plain(x, name, weights, bank, slots) for name in NAMES]
        gate, up = (plain(x, name, weights, bank, slots) for name in GATED)
        theirs.append(F.silu(gate) * up)
        for one, other in zip(ours, theirs, strict=True):
            apart = (one.float() - other.float()).abs().max() / other.float().abs().max()
            assert torch.isfinite(apart)
            largest = max(largest, float(apart))
    return largest


def plain(
    x: Tensor, name: str, weights: Mapping[str, Tensor], bank: AdapterBank | None, slots: Tensor
) -> Tensor:
    y = F.linear(x, weights[name], weights.get(f"{name}.bias"))
    return y + bank.delta(name, x, slots) if bank is not None and name in bank else y


def bank_of(
    weights: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device, random
) -> AdapterBank:
    """With two adapters of ranks 3 and 12, in slots 0 and 1."""
    shapes = {name: tuple(weights[name].shape) for name in names}
    bank = AdapterBank(shapes, device)
    versions = []
    for rank in (3, 12):
        factors = {
            name: (random(rank, inner) * inner**-0.5, random(out, rank) * rank**-0.5)
            for name, (out, inner) in shapes.items()
        }
        versions.append(Version(f"rank {rank}", None, weights, factors, 0.5))
    assert bank.place(versions) == [0, 1]
    return bank
