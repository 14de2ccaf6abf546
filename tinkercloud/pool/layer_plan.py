"""Which layers lie on which device: contiguous runs, in the order in which llama.cpp splits.

A model of N layers is N + 1 units for llama.cpp, the last one the output. Its `--tensor-split`
takes proportions, gives unit i to the first device whose cumulated share exceeds i / (N + 1), and
so follows counts of units exactly.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tinkercloud.errors import ConfigError
from tinkercloud.pool.model_file import ModelFile
from tinkercloud.pool.pool_file import Model
from tinkercloud.pool.sizes import size_text

_BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class Device:
    """owner: a worker's name, or the coordinator's. endpoint: HOST:PORT of its RPC server; None:
    of the coordinator itself."""

    owner: str
    device: str
    memory_bytes: int
    endpoint: str | None = None

    @property
    def label(self) -> str:
        return f"{self.owner}/{self.device}"


@dataclass(frozen=True, slots=True)
class Share:
    """What a device holds: num_units of the plan from `first` on; the output counts as one."""

    device: Device
    first: int
    num_units: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """shares: of the devices that hold something, in order. logits_bytes: of the coordinator's RAM
    that the matrix of logits takes there, with the logits of a batch; 0: it lies with the output.
    """

    model: Model
    num_layers: int
    shares: tuple[Share, ...]
    logits_bytes: int = 0

    def layers_text(self, share: Share) -> str:
        last = share.first + share.num_units - 1
        if share.first == self.num_layers:
            return "output"
        layers = f"layers {share.first}-{min(last, self.num_layers - 1)}"
        return layers + " and output" if last == self.num_layers else layers

    def lines(self) -> list[str]:
        """A line for each device, and one for logits on the coordinator."""
        lines = [
            f"{share.device.label:24} {self.layers_text(share):24} "
            f"{size_text(share.num_bytes):>10} of {size_text(share.device.memory_bytes)}"
            for share in self.shares
        ]
        if self.logits_bytes:
            size = size_text(self.logits_bytes)
            lines.append(f"{'coordinator/CPU':24} {'logits':24} {size:>10} besides its memory")
        return lines


class PoolTooSmall(ConfigError):
    """missing_bytes: what would have to be added."""

    def __init__(self, text: str, missing_bytes: int):
        super().__init__(text)
        self.missing_bytes = missing_bytes


def unit_bytes(file: ModelFile, model: Model) -> list[int]:
    """Weights and cache of each layer, then of the output, with the logits of a batch where they
    are not on the coordinator."""
    layers = [
        weights + file.cache_bytes(layer, model.context, model.cache_type)
        for layer, weights in enumerate(file.layer_bytes)
    ]
    output = file.output_bytes + file.logits_bytes(model.ubatch)
    return [*layers, output - coordinator_logits_bytes(file, model)]


def coordinator_logits_bytes(file: ModelFile, model: Model) -> int:
    if model.output is None:
        return 0
    return file.logits_matrix_bytes + file.logits_bytes(model.ubatch)


def plan_layers(
    file: ModelFile, model: Model, devices: Sequence[Device], reserve_bytes: int
) -> LayerPlan:
    """devices: in llama.cpp's order, the coordinator's CPU first, then RPC servers, then its GPUs.
    reserve_bytes: kept free on each. Raises PoolTooSmall, or ConfigError where `tensor_split` names
    another number of devices."""
    units = unit_bytes(file, model)
    fixed_bytes = reserve_bytes + file.compute_bytes(model.ubatch)
    rooms = [max(0, device.memory_bytes - fixed_bytes) for device in devices]
    if model.tensor_split is None:
        counts = balanced_counts(units, rooms)
        if counts is None:
            raise _too_small(file, devices, units, rooms, fixed_bytes)
    else:
        counts = _given_counts(model.tensor_split, devices, len(units))
    shares, first = list[Share](), 0
    for device, room, count in zip(devices, rooms, counts, strict=True):
        num_bytes = sum(units[first : first + count])
        if count and num_bytes > room:
            raise PoolTooSmall(
                f"tensor_split gives {device.label} {count} of {len(units)} parts, "
                f"{size_text(num_bytes)}, and it has room for {size_text(room)}: "
                f"{num_bytes - room} bytes are missing; give it a smaller share",
                num_bytes - room,
            )
        if count:
            shares.append(Share(device, first, count, num_bytes + fixed_bytes))
        first += count
    logits_bytes = coordinator_logits_bytes(file, model)
    return LayerPlan(model, file.num_layers, tuple(shares), logits_bytes)


def balanced_counts(units: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """Units of each device so that the fullest one, in proportion to its room, is as empty as it
    can be; None where they do not fit. Filling in order is best for a given fullness, and what fits
    at one fullness fits at every larger one."""
    if _filled(units, rooms, 1.0) is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(units, rooms, middle) else (middle, high)
    return _filled(units, rooms, high)


def split_counts(shares: Sequence[float], num_units: int) -> list[int]:
    """As llama.cpp computes it: float32 shares, cumulated and normalised."""
    cumulated = list(accumulate(_float32(share) for share in shares))
    ends = [_float32(_float32(end) / _float32(cumulated[-1])) for end in cumulated]
    counts = [0] * len(shares)
    for unit in range(num_units):
        counts[bisect_right(ends, _float32(unit / num_units))] += 1
    return counts


def _filled(units: Sequence[int], rooms: Sequence[int], fullness: float) -> list[int] | None:
    counts, unit = [], 0
    for room in rooms:
        first, left = unit, room * fullness
        while unit < len(units) and units[unit] <= left:
            left -= units[unit]
            unit += 1
        counts.append(unit - first)
    return counts if unit == len(units) else None


def _given_counts(shares: Sequence[float], devices: Sequence[Device], num_units: int) -> list[int]:
    if len(shares) != len(devices):
        labels = ", ".join(device.label for device in devices)
        raise ConfigError(
            f"tensor_split has {len(shares)} numbers, and there are {len(devices)} devices: "
            f"{labels}; give each one, 0 for none"
        )
    return split_counts(shares, num_units)


def _too_small(
    file: ModelFile,
    devices: Sequence[Device],
    units: Sequence[int],
    rooms: Sequence[int],
    fixed_bytes: int,
) -> PoolTooSmall:
    unit = 0
    for room in rooms:
        while unit < len(units) and units[unit] <= room:
            room -= units[unit]
            unit += 1
    missing = sum(units[unit:])
    have = ", ".join(f"{device.label} {size_text(device.memory_bytes)}" for device in devices)
    return PoolTooSmall(
        f"{file.name} does not fit: layers, cache and logits take {size_text(sum(units))}, and "
        f"{size_text(fixed_bytes)} on each device for activations and reserve; there is "
        f"{have or 'no device'}. {missing} bytes ({size_text(missing)}) are missing: add a worker "
        "or memory, or take a smaller context, cache_type q8_0 or a smaller quantization",
        missing,
    )


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]
