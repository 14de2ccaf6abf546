"""Operations that all ranks enter alike: sharing errors, gathering values and tensors."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Collectives:
    """group: of all ranks, for tensors in host memory (gloo; NCCL moves device memory only)."""

    def __init__(self) -> None:
        group: Any = dist.new_group(backend="gloo")
        self.group: ProcessGroup = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """What fails in the block on one rank is raised on all.

        The block may hold no collective: a rank that fails before it would leave the others waiting
        in it, and never get to the exchange of errors.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
            error = caught
        for shared in self.all_gather(_portable(error)):
            if shared is not None:
                raise error or shared

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small values: they are pickled."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of all ranks, one at a time, on the first rank; nothing on the others.

        tensors: this rank's, float32 in host memory; each name on one rank only. Every rank must
        exhaust the iterator: sends and receives pair up in this order.
        """
        manifests = self.all_gather({name: tuple(t.shape) for name, t in tensors.items()})
        for rank, manifest in enumerate(manifests):
            for name, shape in manifest.items():
                if rank == 0:
                    if self.is_first:
                        yield name, tensors[name]
                elif self.is_first:
                    tensor = torch.empty(shape)
                    dist.recv(tensor, rank, group=self.group)
                    yield name, tensor
                elif rank == self.rank:
                    dist.send(tensors[name].contiguous(), 0, group=self.group)


def _portable(error: Exception | None) -> Exception | None:
    """The error, or one of the same text where its class does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a foreign class raises when pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
