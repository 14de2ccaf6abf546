"""Full-parameter training: the rank's network is the one model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import nn

from tinkercloud.cluster.training import rank_checkpoint
from tinkercloud.cluster.training.rank_models import Form, Models, Rank, RankModel
from tinkercloud.cluster.training.rank_optimizer import Kind, RankOptimizer
from tinkercloud.cluster.weights.conversion import Bucket, full_tensors, load_base
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import ModelStateLost, UserError
from tinkercloud.weights.checkpoints import FULL_FILE, OPTIMIZER_FILE, TrainingState

_WEIGHTS: dict[Kind, str] = {"weight": ""}
_MOMENTS: dict[Kind, str] = {"exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq."}


class FullModel(Models):
    """At most one model at a time. Its float32 weights are those of the optimizer."""

    def __init__(self, rank: Rank):
        self.rank = rank
        rank.network.requires_grad_(True)
        optimizer = RankOptimizer(
            rank.network,
            rank.network.config,
            reduce_gradients=_reduce_gradients,
            is_counted=self._is_counted,
            snapshot_on_host=True,
        )
        self._model = RankModel(LoraSpec(rank=0, seed=0), None, optimizer)
        self._id: str | None = None
        self._replaced = False

    def _is_counted(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a norm counts this rank's part: of copies, only the first rank's."""
        if name == "output_layer.weight" and getattr(parameter, "shared", False):
            return False  # tied: the first pipeline stage counts it as its embedding
        if self.rank.catalogue.entries[name].split != "replicated":
            return True
        return parallel_state.get_tensor_model_parallel_rank() == 0

    def create(self, model_id: str, spec: LoraSpec) -> None:
        self._check(model_id, spec)
        if not self._is_base:
            self._id = None  # should loading fail, no model has these weights
            load_base(self.rank.network, self.rank.catalogue, self.rank.settings.folder)
            for name, parameter in self._model.optimizer.params.items():
                self._model.optimizer.write(name, "weight", parameter.detach().float())
            self._replaced = False
        self._begin(model_id, spec)

    @property
    def _is_base(self) -> bool:
        """Whether the weights are still those of the base model."""
        return not self._replaced and self._model.optimizer.num_steps == 0

    def _check(self, model_id: str, spec: LoraSpec) -> None:
        base = self.rank.settings.base_model
        if spec.rank != 0:
            raise UserError(f"{base} is trained full-parameter here; ask for rank 0")
        if self._id not in (None, model_id):
            raise UserError(f"another full-parameter model is trained on the GPUs of {base}")

    def _begin(self, model_id: str, spec: LoraSpec) -> None:
        self._id, self._model.spec = model_id, spec
        self._model.optimizer.reset()

    def load(
        self, model_id: str, folder: Path, state: TrainingState, *, with_optimizer: bool
    ) -> None:
        catalogue, collectives = self.rank.catalogue, self.rank.collectives
        base = self.rank.settings.base_model
        files = [(folder / FULL_FILE, _WEIGHTS)]
        if with_optimizer:
            files.append((folder / OPTIMIZER_FILE, _MOMENTS))
        with collectives.shared_errors():
            # Everything is checked before the first tensor is replaced: there is no second copy of
            # the weights to go back to.
            self._check(model_id, state.lora)
            for path, kinds in files:
                rank_checkpoint.check_network(path, catalogue, tuple(kinds.values()), base)
                rank_checkpoint.check_finite(path, collectives.rank, collectives.size)
        with collectives.shared_errors():
            self._id, self._replaced = None, True  # should it fail, no model has these weights
            self._begin(model_id, state.lora)
            for path, kinds in files:
                rank_checkpoint.load_network(self._model, catalogue, path, kinds)
            self._model.optimizer.num_steps = state.num_steps if with_optimizer else 0

    def save(self, model: RankModel, folder: Path, *, with_optimizer: bool) -> None:
        rank = self.rank
        write = partial(rank_checkpoint.save_network, model, rank.catalogue, rank.collectives)
        write(folder / FULL_FILE, _WEIGHTS)
        if with_optimizer:
            write(folder / OPTIMIZER_FILE, _MOMENTS)

    def delete(self, model_id: str) -> None:
        if model_id == self._id:
            self._id, self._replaced = None, not self._is_base
            self._model.optimizer.reset()

    def get(self, model_id: str) -> RankModel:
        if self._id is None or model_id != self._id:
            raise ModelStateLost(model_id)
        return self._model

    def find(self, model_id: str) -> RankModel:
        return self.get(model_id)

    @contextmanager
    def active(self, model: RankModel | None) -> Iterator[None]:
        assert model is not None or self._is_base, "training has replaced the base's weights"
        yield

    def buckets(self, model: RankModel | None, bucket_bytes: int) -> Iterator[Bucket]:
        assert model is not None or self._is_base, "training has replaced the base's weights"
        tensors = self.rank.catalogue.tensors
        yield from full_tensors(
            self.rank.catalogue, lambda name: tensors[name].detach().clone(), bucket_bytes
        )

    def export(self, model: RankModel | None, folder: Path, form: Form) -> None:
        if form == "adapter":
            raise UserError("a full-parameter model has no adapter to export")
        self.write_merged(model, folder)

    def resident(self) -> list[RankModel]:
        return [self._model] if not self._model.store.is_offloaded else []


def _reduce_gradients(ddp: DistributedDataParallel) -> None:
    finalize_model_grads([ddp])
