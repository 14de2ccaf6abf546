"""Training on one of many ranks: what an actor of the train group runs.

SPMD: every rank of the group calls each method with the same arguments, in the same order, and
either all return or all raise the same error. (A rank that dies leaves the others waiting in a
collective; `rank_actors` notices and ends them.)
"""

import gc
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tinkercloud.cluster.rollout.weight_sync import Sent, Transfer
from tinkercloud.cluster.training.host_store import HostStore, bytes_of
from tinkercloud.cluster.training.megatron_model import build_model, initialize, load_hooks
from tinkercloud.cluster.training.rank_types import Form, RankOutput, RankSettings
from tinkercloud.cluster.weights.conversion import Bucket, Catalogue, load_base
from tinkercloud.core.types import AdamParams, LoraSpec, TrainBatch
from tinkercloud.decoding.math_kernels import resolve_math_kernels
from tinkercloud.weights.checkpoints import (
    TrainingState,
    read_state,
    require_optimizer,
    write_state,
)

if TYPE_CHECKING:
    from tinkercloud.cluster.training.rank_models import Models, RankModel

__all__ = ["MegatronRank", "RankOutput", "RankSettings"]

BUCKET_BYTES = 256 * 1024**2  # of a weight transfer


class MegatronRank:
    """Serves either many LoRA models on one frozen base or one full-parameter model."""

    def __init__(self, settings: RankSettings):
        self._settings, plan = settings, settings.plan
        hooks = load_hooks(settings.prepare)
        resolve_math_kernels()
        world = (settings.rank, settings.world_size, settings.init_method)
        initialize(plan.megatron, *world, hooks, settings.timeout_s)
        # Megatron is imported after `prepare`, which may have to patch what it imports.
        from tinkercloud.cluster.training.collectives import Collectives
        from tinkercloud.cluster.training.full_model import FullModel
        from tinkercloud.cluster.training.lora_model import LoraModels
        from tinkercloud.cluster.training.rank_forward import BatchRunner
        from tinkercloud.cluster.training.rank_models import Rank

        self._collectives = Collectives()
        self._device = torch.device(hooks.device)
        self._network = build_model(plan.megatron, hooks).train()
        catalogue = Catalogue(self._network, plan.megatron, plan.architecture)
        with self._collectives.shared_errors():
            load_base(self._network, catalogue, settings.folder)
        rank = Rank(self._network, catalogue, settings, self._collectives)
        self._models: Models
        if plan.lora_rank is None:
            self._models = FullModel(rank)
        else:
            self._models = LoraModels(rank, self._device)
        self._runner = BatchRunner(self._network, plan, self._device, self._collectives.group)
        self._store = HostStore()
        self._offloaded: list[RankModel] | None = None  # by `offload`; None: the rank is loaded

    # ---- models

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """A new model at step 0. Raises UserError for an adapter rank that was not planned for."""
        self._assert_loaded()
        with self._collectives.shared_errors():
            self._models.create(model_id, spec)

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> LoraSpec:
        """A model from a checkpoint of any backend or plan. Replaces one of the same id."""
        self._assert_loaded()
        with self._collectives.shared_errors():
            state = read_state(folder)
            if with_optimizer:
                require_optimizer(state)
        self._models.load(model_id, folder, state, with_optimizer=with_optimizer)
        return state.lora

    def delete(self, model_id: str) -> None:
        """Unknown ids are ignored."""
        self._models.delete(model_id)
        gc.collect()  # Megatron's gradient hooks hold parameters in reference cycles
        self._free_cached()

    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write a checkpoint into an existing folder that all ranks see."""
        model = self._model(model_id)
        self._models.save(model, folder, with_optimizer=with_optimizer)
        steps = model.optimizer.num_steps
        state = TrainingState(self._settings.base_model, model.spec, steps, with_optimizer)
        with self._collectives.shared_errors():
            if self._collectives.is_first:
                write_state(state, folder)

    def _model(self, model_id: str) -> "RankModel":
        self._assert_loaded()
        return self._models.get(model_id)

    def _active(self, model_id: str | None) -> AbstractContextManager[None]:
        """In the block the network computes as this model; None: as the base."""
        self._assert_loaded()
        return self._models.active(None if model_id is None else self._models.get(model_id))

    # ---- training

    def forward_backward_only(self, model_id: str, batch: TrainBatch) -> RankOutput | None:
        """Add the gradient of the summed loss to the model's accumulator, or change nothing.

        None on ranks that report nothing. Raises UserError.
        """
        model = self._model(model_id)
        model.optimizer.begin()
        try:
            with self._models.active(model):
                output = self._runner.run(batch, backward=True)
        except BaseException:  # whatever it is, part of the gradient may be added
            model.optimizer.undo()
            raise
        model.optimizer.commit()
        return output

    def forward_only(self, model_id: str, batch: TrainBatch) -> RankOutput | None:
        """As forward_backward_only, without touching the accumulator."""
        with self._active(model_id):
            return self._runner.run(batch, backward=False)

    def apply_optimizer_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Reduce the gradient over the ranks, apply it, clear it; metrics are the same on every
        rank."""
        return self._model(model_id).optimizer.step(params)

    # ---- weights for others

    def weight_buckets(self, model_id: str | None, bucket_bytes: int) -> Iterator[Bucket]:
        """The model's full weights, adapters merged in, in the base's dtype, by Hugging Face names,
        on every rank. Every rank must exhaust the iterator: each bucket is gathered by collectives.
        """
        self._assert_loaded()
        model = None if model_id is None else self._models.get(model_id)
        yield from self._models.buckets(model, bucket_bytes)

    def export(self, model_id: str | None, folder: Path, *, form: Form) -> None:
        """For engines: a PEFT folder ("adapter") or a Hugging Face folder ("merged")."""
        self._assert_loaded()
        model = None if model_id is None else self._models.get(model_id)
        self._models.export(model, folder, form=form)

    def send_weights(self, model_id: str, transfer: Transfer) -> Sent:
        """Send the model's full weights, adapters merged in, to engines.

        Offloaded ranks do so too: what they send is on the device meanwhile, nothing else.
        """
        from tinkercloud.cluster.weights.sender import send

        model = self._models.find(model_id)
        network = [*self._network.parameters(), *self._network.buffers()]
        with (
            self._store.on_device(network),
            model.store.on_device([*network, *model.optimizer.parameter_tensors()]),
        ):
            return send(self._models.buckets(model, BUCKET_BYTES), transfer)

    def checksum(self, model_id: str | None) -> str:
        """SHA-256 of names and bytes of `weight_buckets`, the same on every rank."""
        digest = hashlib.sha256()
        for bucket in self.weight_buckets(model_id, 64 * 1024**2):
            for name, tensor in bucket:
                digest.update(name.encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()

    # ---- memory

    def offload(self) -> int:
        """Move weights, gradients and optimizer state to the host; returns the device bytes freed.

        Until `onload` only `delete`, `stats` and `send_weights` may be called.
        """
        self._assert_loaded()
        self._offloaded = self._models.resident()
        freed = sum(model.offload() for model in self._offloaded)
        if self._settings.plan.lora_rank is not None:
            freed += self._store.offload((), constant=self._network.parameters())
        self._free_cached()
        return freed

    def onload(self) -> int:
        """Bring back what `offload` moved; returns the device bytes taken."""
        assert self._offloaded is not None, "onload without offload"
        taken = self._store.onload() + sum(model.store.onload() for model in self._offloaded)
        self._offloaded = None
        return taken

    def stats(self) -> dict[str, int]:
        """Bytes on this rank's device: params (the network's and adapters'), grads, and optimizer
        (moments, and the float32 copies of narrower weights)."""
        models = self._models.resident()
        sizes = {
            "params": [*self._network.parameters()],
            "grads": [t for m in models for t in m.optimizer.gradient_tensors()],
            "optimizer": [t for m in models for t in m.optimizer.state_tensors()],
        }
        if self._settings.plan.lora_rank is not None:
            sizes["params"] += [t for m in models for t in m.optimizer.parameter_tensors()]
        return {f"{name}_bytes": bytes_of(tensors) for name, tensors in sizes.items()}

    def _assert_loaded(self) -> None:
        assert self._offloaded is None, "this rank's weights are offloaded"

    def _free_cached(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
