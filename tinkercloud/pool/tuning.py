"""Which splits of a model's layers are worth measuring."""

from collections.abc import Sequence

Split = tuple[float, ...] | None


def candidate_splits(memory: Sequence[int]) -> list[tuple[str, Split]]:
    """A description and a `tensor_split` for each; None: by memory. memory: bytes of each device,
    in the plan's order. A network costs time for each machine more, so fewer may be faster."""
    count = len(memory)
    candidates: list[tuple[str, Split]] = [("by memory", None)]
    if count < 2:
        return candidates
    candidates.append(("equal", (1.0,) * count))
    for index in range(count):
        alone = tuple(float(index == other) for other in range(count))
        candidates.append((f"device {index + 1} alone", alone))
    if count > 2:
        gib = [size / 2**30 for size in memory]
        for index in range(count):
            rest = tuple(0.0 if index == n else round(share, 3) for n, share in enumerate(gib))
            if sum(rest) > 0:
                candidates.append((f"without device {index + 1}", rest))
    return candidates
