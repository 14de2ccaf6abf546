"""The engine's models and published versions. Owned by the worker thread."""

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from tinkercloud import flushing
from tinkercloud.core.types import (
    AdamParams,
    FromBase,
    FromCheckpoint,
    FromModel,
    LoraSpec,
    StateCost,
    WeightsSource,
)
from tinkercloud.embedded.model import freed_memory
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.huge_pages import in_huge_pages
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process import memory_budget
from tinkercloud.embedded.process.memory_budget import MemoryBudget
from tinkercloud.embedded.process.state_copies import StateCopies
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.training import checkpoints, state_files
from tinkercloud.embedded.training.block import neighbours
from tinkercloud.embedded.training.checkpoints import Contents
from tinkercloud.embedded.training.linear import join_weights
from tinkercloud.embedded.training.micro_batches import MicroBatch
from tinkercloud.embedded.training.parts import Between, in_parts, nothing
from tinkercloud.embedded.training.trainable_model import (
    TrainableModel,
    frozen,
    full_parameters,
)
from tinkercloud.errors import ModelStateLost
from tinkercloud.weights.adapters import Adapter, fresh_adapter
from tinkercloud.weights.checkpoints import read_state

FULL = LoraSpec(rank=0, seed=0)


class ModelStore:
    """Base models are loaded at their first use and shared, frozen, by everything made of them."""

    def __init__(
        self,
        load_base: Callable[[str], BaseModel],
        versions: VersionCache,
        budget: MemoryBudget | None = None,
    ):
        self._load_base = load_base
        self._budget = budget or MemoryBudget()
        self._bases: dict[str, BaseModel] = {}
        self._models: dict[str, TrainableModel] = {}
        self._versions = versions
        self._specs: dict[str, LoraSpec] = {}  # of versions
        self._copies = StateCopies()
        self._between: Between = nothing

    def yield_to(self, between: Between) -> None:
        """between: is called between the parts of long work on a model, and makes, changes and
        deletes none."""
        self._between = between

    def base(self, name: str) -> BaseModel:
        if name not in self._bases:
            base = self._load_base(name)
            if isinstance(base.weights, dict):  # PyTorch's products read them
                if base.is_llama_family:
                    join_weights(base.weights, neighbours(base.config.num_layers))
                in_huge_pages(base.weights)
            self._bases[name] = base
        return self._bases[name]

    def counts(self) -> dict[str, float | int | str]:
        return {
            "base_models_loaded": len(self._bases),
            "models": len(self._models),
            "versions": len(self._versions),
            "versions_on_disk": self._versions.num_on_disk,
        }

    # ---- models

    def create_model(self, model_id: str, base_model: str, spec: LoraSpec) -> None:
        base = self.base(base_model)
        self._require_room(model_id, spec, base)
        adapter, full = None, None
        if spec.rank > 0:
            shapes = base.config.linear_shapes()
            adapter = fresh_adapter(spec, shapes, base.device, self._between)
        else:
            full = full_parameters(base)
        self._models[model_id] = TrainableModel(model_id, base, spec, adapter, full, self._between)

    def load_model(
        self, model_id: str, base_model: str, directory: Path, with_optimizer: bool
    ) -> LoraSpec:
        base = self.base(base_model)
        self._require_room(model_id, read_state(directory).lora, base)
        model = checkpoints.load(model_id, base, directory, with_optimizer=with_optimizer)
        model.yield_to(self._between)
        self._models[model_id] = model
        return model.spec

    def delete_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)
        self._copies.drop_of(model_id)
        freed_memory.give_back()

    def save_model(self, model_id: str, directory: Path, with_optimizer: bool) -> None:
        checkpoints.save(self.model(model_id), directory, with_optimizer=with_optimizer)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        self.changes(model_id)
        return self.model(model_id).optim_step(params)

    def changes(self, model_id: str) -> None:
        """An operation that changes the model, or its gradient, is about to begin."""
        self._copies.changes(model_id)

    def model(self, model_id: str) -> TrainableModel:
        try:
            return self._models[model_id]
        except KeyError:
            raise ModelStateLost(model_id) from None

    # ---- memory

    def require_pass(self, model: TrainableModel, waiting: Sequence[MicroBatch]) -> None:
        """Room for the largest of a call's micro-batches, one after the other, and for the
        gradient. Raises MemoryShort."""
        num_rows = max((each.num_rows for each in waiting), default=0)
        needed = max((memory_budget.pass_bytes(model, each) for each in waiting), default=0)
        what = f"a pass over {num_rows} tokens at once of a model on {model.base.name}"
        self._budget.require(what, needed, memory_budget.promised_bytes(model))

    def _require_room(self, model_id: str, spec: LoraSpec, base: BaseModel) -> None:
        """For a model that replaces the one of this id. Raises MemoryShort."""
        others = (model for each, model in self._models.items() if each != model_id)
        promised = sum(memory_budget.promised_bytes(model) for model in others)
        what = memory_budget.described(spec, base)
        self._budget.require(what, memory_budget.model_bytes(spec, base), promised)

    # ---- states

    def copy_state(self, model_id: str) -> int:
        """Where there is no memory for it, a copy that lasts until the model's next operation."""
        model = self.model(model_id)
        promised = sum(memory_budget.promised_bytes(each) for each in self._models.values())
        fits = self._budget.has_room(memory_budget.state_bytes(model), promised)
        is_here = model.base.device.type == "cpu"
        return self._copies.copy(model, shares=is_here and not fits)

    def state_writing(self, copy: int, directory: Path) -> Callable[[], StateCost]:
        """What writes the copy, for another thread to call."""
        return self._copies.writing(copy, directory)

    def drop_copy(self, copy: int) -> None:
        self._copies.drop(copy)

    def restore_state(self, model_id: str, base_model: str, directory: Path) -> None:
        base = self.base(base_model)
        self._require_room(model_id, state_files.spec_of(directory), base)
        model = state_files.restore(model_id, base, directory)
        model.yield_to(self._between)
        self._models[model_id] = model

    # ---- versions

    def publish(self, source: WeightsSource) -> str:
        """Ids are never used twice, not even by another engine process."""
        self._require_version(source)
        version_id = f"v-{uuid.uuid4().hex[:16]}"
        version, spec = self._version_of(version_id, source)
        self._versions.put(version)
        self._specs[version_id] = spec
        return version_id

    def release(self, version_id: str) -> None:
        self._versions.drop(version_id)
        self._specs.pop(version_id, None)

    def version(self, version_id: str) -> Version:
        return self._versions.get(version_id)

    def version_writing(self, version_id: str, directory: Path) -> Callable[[], None]:
        """What writes the version as a checkpoint, for another thread to call. Full weights are in
        the base's number type: nothing else was published."""
        version = self.version(version_id)
        names = version.base.config.weight_shapes()
        full = None if version.adapter is not None else {n: version.weights[n] for n in names}
        spec = self._specs[version_id]
        contents = Contents(version.base.name, spec, version.adapter, full)

        def write() -> None:
            checkpoints.write(contents, directory)
            flushing.flush_folder(directory)

        return write

    def _require_version(self, source: WeightsSource) -> None:
        match source:
            case FromBase():
                return  # the base's own weights
            case FromModel(model_id):
                model = self.model(model_id)
                spec, base = model.spec, model.base
            case FromCheckpoint(base_model, directory):
                spec, base = read_state(directory).lora, self.base(base_model)
        what = f"publishing {memory_budget.described(spec, base)}"
        self._budget.require(what, memory_budget.version_bytes(spec, base))

    def _version_of(self, version_id: str, source: WeightsSource) -> tuple[Version, LoraSpec]:
        origin = ""
        match source:
            case FromBase(base_model):
                base = self.base(base_model)
                return Version(version_id, base, base.weights, None, 1.0), FULL
            case FromModel(model_id):
                model, origin = self.model(model_id), model_id
                adapter, spec, base = model.adapter, model.spec, model.base
                weights = base.weights if adapter is not None else model.published()
            case FromCheckpoint(base_model, directory):
                base = self.base(base_model)
                spec, adapter, full, _ = checkpoints.load_weights(base, directory)
                weights = base.weights if full is None else frozen(base, full)
        if adapter is None:
            return Version(version_id, base, weights, None, 1.0, origin), spec
        scale = spec.alpha / spec.rank
        return Version(
            version_id, base, weights, _copied(adapter, self._between), scale, origin
        ), spec


def _copied(adapter: Adapter, between: Between) -> Adapter:
    """The trainer updates its tensors in place; a version must not move with them."""
    modules = in_parts(adapter.items(), between)
    return {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in modules}
