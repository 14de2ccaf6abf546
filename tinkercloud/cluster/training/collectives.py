"""What all ranks do as one: agree on failures, bring tensors to the first rank."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Together:
    """group: of all ranks, for tensors in host memory (gloo)."""

    def __init__(self) -> None:
        group: Any = dist.new_group(backend="gloo")
        self.group: ProcessGroup = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What fails in here on one rank is raised on all. The body may hold no collective that
        the failing rank would leave the others waiting in."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
            error = caught
        for found in self.all(_portable(error)):
            if found is not None:
                raise error or found

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; small ones."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def to_first(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of all ranks, one at a time, on the first rank; nothing on the others.

        own: float32 in host memory; each name on one rank only.
        """
        manifests = self.all({name: tuple(tensor.shape) for name, tensor in own.items()})
        for rank, manifest in enumerate(manifests):
            for name, shape in manifest.items():
                if rank == 0:
                    if self.is_first:
                        yield name, own[name]
                elif self.is_first:
                    tensor = torch.empty(shape)
                    dist.recv(tensor, rank, group=self.group)
                    yield name, tensor
                elif rank == self.rank:
                    dist.send(own[name].contiguous(), 0, group=self.group)


def _portable(error: Exception | None) -> Exception | None:
    """The error, or, where its kind does not survive a journey, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a foreign class does when pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
