"""Adapter training: many adapters on one frozen network."""

import copy
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from tinkercloud.cluster.lora.layers import AdapterSwitch, Pair, weight_delta
from tinkercloud.cluster.lora.sites import Site, find_sites
from tinkercloud.cluster.training import rank_checkpoint
from tinkercloud.cluster.training.adapter_slots import AdapterShapes, AdapterSlot
from tinkercloud.cluster.training.rank_models import Form, Models, Rank, RankModel
from tinkercloud.cluster.training.rank_optimizer import RankOptimizer
from tinkercloud.cluster.weights.conversion import Bucket, Catalogue, Item, full_tensors
from tinkercloud.cluster.weights.mapping import Entry, Vocabulary
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import ModelStateLost, UserError
from tinkercloud.weights.checkpoints import TrainingState


class LoraModels(Models):
    """Adapters by model id; at most `resident_adapters` of them are in device memory."""

    def __init__(self, rank: Rank, device: torch.device):
        self.rank, self._device = rank, device
        network, plan = rank.network, rank.settings.plan
        network.requires_grad_(False)
        self._sites = find_sites(network, plan.megatron)
        self._shapes = AdapterShapes(plan)
        self._switch = AdapterSwitch(self._sites)
        self._models: OrderedDict[str, RankModel] = OrderedDict()  # in order of last use
        if plan.megatron.recompute_granularity == "full" and network.pre_process:
            network.embedding.register_forward_hook(_require_gradient)

    # ---- life

    def create(self, model_id: str, spec: LoraSpec) -> None:
        model = self._new(spec, self._shapes.ranks(spec))
        assert model.slot is not None
        model.slot.load(self._shapes.initial(spec, list(model.slot.pairs)))
        self._add(model_id, model)

    def load(
        self, model_id: str, folder: Path, state: TrainingState, *, with_optimizer: bool
    ) -> None:
        with self.rank.collectives.shared_errors():
            spec = state.lora
            self._check_rank(spec)
            ranks = rank_checkpoint.adapter_ranks(folder, spec, self._shapes)
            model = self._new(spec, ranks)
            rank_checkpoint.load_lora(model, folder, with_optimizer=with_optimizer)
            model.optimizer.num_steps = state.num_steps if with_optimizer else 0
        self._add(model_id, model)

    def save(self, model: RankModel, folder: Path, *, with_optimizer: bool) -> None:
        collectives, base = self.rank.collectives, self.rank.settings.base_model
        rank_checkpoint.save_lora(model, base, self._shapes, collectives, folder)
        if with_optimizer:
            rank_checkpoint.save_lora_moments(model, self._shapes, collectives, folder)

    def _new(self, spec: LoraSpec, ranks: dict[str, int]) -> RankModel:
        """A model that is not registered yet, so that one that fails to load leaves no trace; its
        tensors are 0."""
        self._check_rank(spec)
        self._offload_oldest()
        slot = AdapterSlot(spec, ranks, self._sites, self._device)
        optimizer = RankOptimizer(
            slot,
            self.rank.network.config,
            reduce_gradients=slot.reduce_gradients,
            is_counted=slot.is_counted,
            snapshot_on_host=False,
        )
        return RankModel(spec, slot, optimizer)

    def _check_rank(self, spec: LoraSpec) -> None:
        largest = self.rank.settings.plan.lora_rank or 0
        if not 0 < spec.rank <= largest:
            raise UserError(
                f"rank {spec.rank} is not served here: the GPUs of "
                f"{self.rank.settings.base_model} were planned for adapters of rank 1 to {largest}"
            )

    def _add(self, model_id: str, model: RankModel) -> None:
        self._models.pop(model_id, None)
        self._models[model_id] = model

    def delete(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def find(self, model_id: str) -> RankModel:
        if model_id not in self._models:
            raise ModelStateLost(model_id)
        return self._models[model_id]

    def get(self, model_id: str) -> RankModel:
        model = self.find(model_id)
        self._models.move_to_end(model_id)
        if model.store.is_offloaded:
            self._offload_oldest()
            model.store.onload()
        return model

    def _offload_oldest(self) -> None:
        """Offload the least recently used, so that one more fits into device memory."""
        resident = self.resident()
        for model in resident[: max(0, len(resident) + 1 - self.rank.settings.resident_adapters)]:
            model.offload()

    def resident(self) -> list[RankModel]:
        return [model for model in self._models.values() if not model.store.is_offloaded]

    @contextmanager
    def active(self, model: RankModel | None) -> Iterator[None]:
        self._switch.active = model.slot.pairs if model is not None and model.slot else None
        try:
            yield
        finally:
            self._switch.active = None

    # ---- weights

    def buckets(self, model: RankModel | None, bucket_bytes: int) -> Iterator[Bucket]:
        catalogue = self.rank.catalogue
        pairs = model.slot.pairs if model is not None and model.slot else {}
        places = {
            site.weight_name(i): (site, i) for site in self._sites for i in range(len(site.blocks))
        }

        def shard(name: str) -> Tensor:
            weight = catalogue.tensors[name]
            # A tied head is the embedding, which the adapter does not change.
            is_tied_head = name == "output_layer.weight" and self._is_tied
            if name not in places or is_tied_head:
                return weight.clone()
            return _merged(weight, *places[name], pairs)

        yield from full_tensors(catalogue, shard, bucket_bytes)
        if self._is_tied and model is not None and model.spec.train_unembed:
            yield from self._untied_head(pairs, bucket_bytes)

    @property
    def _is_tied(self) -> bool:
        return not self.rank.settings.plan.megatron.untie_embeddings_and_output_weights

    def _untied_head(self, pairs: dict[str, Pair], bucket_bytes: int) -> Iterator[Bucket]:
        """The unembedding, as a tensor of its own: merged with its adapter it differs from the
        embedding."""
        arguments, network = self.rank.settings.plan.megatron, self.rank.network
        form = Vocabulary(arguments.vocab_size, arguments.padded_vocab_size)
        entry = Entry("output_layer.weight", ("lm_head.weight",), "tp", False, form)
        stage = parallel_state.get_pipeline_model_parallel_world_size() - 1
        shape = (arguments.vocab_size, arguments.hidden_size)
        catalogue: Catalogue = copy.copy(self.rank.catalogue)
        dtype = next(network.parameters()).dtype
        catalogue.items = [Item(stage, None, entry, {"lm_head.weight": shape}, dtype)]

        def shard(name: str) -> Tensor:
            head = next(site for site in self._sites if site.name == "output_layer")
            return _merged(network.shared_embedding_or_output_weight(), head, 0, pairs)

        yield from full_tensors(catalogue, shard, bucket_bytes)

    def export(self, model: RankModel | None, folder: Path, form: Form) -> None:
        if form == "merged":
            names = self.write_merged(model, folder)
            with self.rank.collectives.shared_errors():
                if self.rank.collectives.is_first and self._is_tied and "lm_head.weight" in names:
                    _untie(folder / "config.json")
            return
        assert model is not None, "the base has no adapter"
        collectives, base = self.rank.collectives, self.rank.settings.base_model
        rank_checkpoint.save_lora(model, base, self._shapes, collectives, folder)


def _merged(weight: Tensor, site: Site, block: int, pairs: dict[str, Pair]) -> Tensor:
    delta = weight_delta(site, block, pairs)
    return weight.clone() if delta is None else (weight.float() + delta).to(weight.dtype)


def _untie(path: Path) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))


def _require_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Megatron recomputes layers by a reentrant autograd function (`tensor_parallel.checkpoint`),
    which has a gradient only if an input requires one; with a frozen embedding none does."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
