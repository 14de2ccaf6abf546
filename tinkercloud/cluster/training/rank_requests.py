"""The operations of training ranks, as requests that a train group sends to its actors. No torch.

Each request type is one method of `TrainRank`; the classes of ranks (`train_rank.MegatronRank`,
`miles.MilesRank`) say what it does.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from tinkercloud.cluster.rollout.weight_sync import Sent, Transfer
from tinkercloud.cluster.training.rank_types import Form, RankOutput
from tinkercloud.core.types import AdamParams, LoraSpec, TrainBatch

R = TypeVar("R")


class TrainRank(Protocol):
    """What an actor holds. Ranks that train adapters only need no `send_weights` and no
    `checksum`: engines get their weights as exported files."""

    def create(self, model_id: str, spec: LoraSpec) -> None: ...

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> LoraSpec: ...

    def delete(self, model_id: str) -> None: ...

    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None: ...

    def forward_backward_only(self, model_id: str, batch: TrainBatch) -> RankOutput | None: ...

    def forward_only(self, model_id: str, batch: TrainBatch) -> RankOutput | None: ...

    def apply_optimizer_step(self, model_id: str, params: AdamParams) -> dict[str, float]: ...

    def export(self, model_id: str | None, folder: Path, *, form: Form) -> None: ...

    def send_weights(self, model_id: str, transfer: Transfer) -> Sent: ...

    def checksum(self, model_id: str | None) -> str: ...

    def offload(self) -> int: ...

    def onload(self) -> int: ...

    def stats(self) -> dict[str, int]: ...


class RankRequest(ABC, Generic[R]):
    """One operation, run on every rank of a group; `R` is the type of each rank's result."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Of the method, for logs and errors: "forward_only"."""
        return re.sub(r"\B(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def run(self, rank: TrainRank) -> R: ...


@dataclass(frozen=True, slots=True)
class Create(RankRequest[None]):
    model_id: str
    spec: LoraSpec

    def run(self, rank: TrainRank) -> None:
        rank.create(self.model_id, self.spec)


@dataclass(frozen=True, slots=True)
class Load(RankRequest[LoraSpec]):
    model_id: str
    folder: Path
    with_optimizer: bool

    def run(self, rank: TrainRank) -> LoraSpec:
        return rank.load(self.model_id, self.folder, with_optimizer=self.with_optimizer)


@dataclass(frozen=True, slots=True)
class Delete(RankRequest[None]):
    model_id: str

    def run(self, rank: TrainRank) -> None:
        rank.delete(self.model_id)


@dataclass(frozen=True, slots=True)
class Save(RankRequest[None]):
    model_id: str
    folder: Path
    with_optimizer: bool

    def run(self, rank: TrainRank) -> None:
        rank.save(self.model_id, self.folder, with_optimizer=self.with_optimizer)


@dataclass(frozen=True, slots=True)
class BatchRequest(RankRequest[RankOutput | None]):
    """batch None: it is in the object store, and the actor puts it back."""

    model_id: str
    batch: TrainBatch | None

    def with_batch(self, batch: TrainBatch | None) -> Self:
        return replace(self, batch=batch)

    def run(self, rank: TrainRank) -> RankOutput | None:
        assert self.batch is not None, "the actor did not put the batch back"
        return self.run_on(rank, self.batch)

    @abstractmethod
    def run_on(self, rank: TrainRank, batch: TrainBatch) -> RankOutput | None: ...


@dataclass(frozen=True, slots=True)
class ForwardBackwardOnly(BatchRequest):
    def run_on(self, rank: TrainRank, batch: TrainBatch) -> RankOutput | None:
        return rank.forward_backward_only(self.model_id, batch)


@dataclass(frozen=True, slots=True)
class ForwardOnly(BatchRequest):
    def run_on(self, rank: TrainRank, batch: TrainBatch) -> RankOutput | None:
        return rank.forward_only(self.model_id, batch)


@dataclass(frozen=True, slots=True)
class ApplyOptimizerStep(RankRequest[dict[str, float]]):
    model_id: str
    params: AdamParams

    def run(self, rank: TrainRank) -> dict[str, float]:
        return rank.apply_optimizer_step(self.model_id, self.params)


@dataclass(frozen=True, slots=True)
class Export(RankRequest[None]):
    model_id: str | None
    folder: Path
    form: Form

    def run(self, rank: TrainRank) -> None:
        rank.export(self.model_id, self.folder, form=self.form)


@dataclass(frozen=True, slots=True)
class SendWeights(RankRequest[Sent]):
    model_id: str
    transfer: Transfer

    def run(self, rank: TrainRank) -> Sent:
        return rank.send_weights(self.model_id, self.transfer)


@dataclass(frozen=True, slots=True)
class Checksum(RankRequest[str]):
    model_id: str | None

    def run(self, rank: TrainRank) -> str:
        return rank.checksum(self.model_id)


@dataclass(frozen=True, slots=True)
class Offload(RankRequest[int]):
    def run(self, rank: TrainRank) -> int:
        return rank.offload()


@dataclass(frozen=True, slots=True)
class Onload(RankRequest[int]):
    def run(self, rank: TrainRank) -> int:
        return rank.onload()


@dataclass(frozen=True, slots=True)
class Stats(RankRequest[dict[str, int]]):
    def run(self, rank: TrainRank) -> dict[str, int]:
        return rank.stats()
