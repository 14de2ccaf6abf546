"""A model on one rank, and the operations on a rank's models: the base of the two kinds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinkercloud.cluster.training.adapter_slots import AdapterSlot
from tinkercloud.cluster.training.collectives import Collectives
from tinkercloud.cluster.training.host_store import HostStore
from tinkercloud.cluster.training.rank_optimizer import RankOptimizer
from tinkercloud.cluster.training.rank_types import RankSettings
from tinkercloud.cluster.weights.conversion import Bucket, Catalogue, HuggingFaceWriter
from tinkercloud.core.types import LoraSpec
from tinkercloud.weights.checkpoints import TrainingState

Form = Literal["adapter", "merged"]


@dataclass(slots=True)
class RankModel:
    """One trained model on this rank. slot: its adapter; None: it is the network itself."""

    spec: LoraSpec
    slot: AdapterSlot | None
    optimizer: RankOptimizer
    store: HostStore = field(default_factory=HostStore)

    def offload(self) -> int:
        """Move all of its tensors to the host; returns the device bytes freed."""
        optimizer = self.optimizer
        tensors = [*optimizer.parameter_tensors(), *optimizer.state_tensors()]
        if optimizer.has_gradient:
            return self.store.offload([*tensors, *optimizer.gradient_tensors()])
        return self.store.offload(tensors, zero=optimizer.gradient_tensors())


@dataclass(frozen=True, slots=True)
class Rank:
    """What the models of a rank share. network: this rank's GPTModel."""

    network: Any
    catalogue: Catalogue
    settings: RankSettings
    collectives: Collectives


class Models(ABC):
    """A rank's models. Every method is called on all ranks alike, in the same order."""

    rank: Rank

    @abstractmethod
    def create(self, model_id: str, spec: LoraSpec) -> None: ...

    @abstractmethod
    def load(
        self, model_id: str, folder: Path, state: TrainingState, *, with_optimizer: bool
    ) -> None: ...

    @abstractmethod
    def save(self, model: RankModel, folder: Path, *, with_optimizer: bool) -> None: ...

    @abstractmethod
    def delete(self, model_id: str) -> None: ...

    @abstractmethod
    def get(self, model_id: str) -> RankModel:
        """The model, in device memory. Raises ModelStateLost."""

    @abstractmethod
    def find(self, model_id: str) -> RankModel:
        """The model, offloaded or not. Raises ModelStateLost."""

    @abstractmethod
    def active(self, model: RankModel | None) -> AbstractContextManager[None]:
        """In the block the network computes as this model (None: as the base)."""

    @abstractmethod
    def buckets(self, model: RankModel | None, bucket_bytes: int) -> Iterator[Bucket]:
        """Full weights of the model by Hugging Face names, on every rank. Copies: training does not
        change them."""

    @abstractmethod
    def export(self, model: RankModel | None, folder: Path, form: Form) -> None: ...

    @abstractmethod
    def resident(self) -> list[RankModel]:
        """The models in device memory, in order of last use."""

    def write_merged(self, model: RankModel | None, folder: Path) -> set[str]:
        """The weights as a Hugging Face folder; returns their names."""
        rank = self.rank
        writer = (
            HuggingFaceWriter(folder, rank.settings.folder) if rank.collectives.is_first else None
        )
        error: OSError | None = None
        names: set[str] = set()
        for bucket in self.buckets(model, BUCKET_BYTES):
            names |= {name for name, _ in bucket}
            # All ranks go on gathering when the first one's disk is full: if it stopped, the others
            # would wait for it in the next collective.
            if writer is not None and error is None:
                error = _attempt(writer, bucket)
        with rank.collectives.shared_errors():
            if error is not None:
                raise error
            if writer is not None:
                writer.finish()
        return names


BUCKET_BYTES = 256 * 1024**2


def _attempt(writer: HuggingFaceWriter, bucket: Bucket) -> OSError | None:
    try:
        writer.add(bucket)
    except OSError as error:
        return error
    return None
