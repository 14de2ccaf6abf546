"""An installed Miles instead of our own Megatron ranks (the setting `cluster.trainer: miles`).

`MilesRank` has the methods of a `MegatronRank`, for the same train group, as its only rank: Miles
starts its ranks itself. It drives Miles by the executor contract of its Tinker gateway: adapters
are in numbered slots (load_slot, unload_slot, save_slot, export_slot), data is one dict per datum
(forward_backward, forward_only), and one optim_step takes Adam's parameters by slot.

It can do less than our ranks: adapters only, as many as there are slots; no gspo; one target per
position; no seed per adapter; no offload, so that sampling needs GPUs of its own. A checkpoint
holds the adapter in our format and, for exact resumption by Miles, in Miles' format in `miles/`.
"""

import asyncio
import itertools
import logging
import shutil
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tinkercloud.cluster.training.miles_start import start_executor
from tinkercloud.cluster.training.rank_types import Form, RankOutput, RankSettings
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, TrainBatch
from tinkercloud.errors import ConfigError, EngineDied, ModelStateLost, UserError
from tinkercloud.weights.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinkercloud.weights.checkpoints import TrainingState, read_state, write_state

logger = logging.getLogger(__name__)

NATIVE_FOLDER = "miles"
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
DATUM_KEYS = {  # ours -> Miles', of a datum's loss inputs
    "weights": "weights",
    "advantages": "advantages",
    "logprobs": "sampling_logprobs",
}


class Executor(Protocol):
    """The part of Miles' contract that is used. An answer may be {"error": text}."""

    def trainer_dead(self) -> Any: ...
    async def load_slot(
        self, slot: int, rank: int, alpha: float, ckpt_path: str | None, load_optimizer: bool
    ) -> Any: ...
    async def unload_slot(self, slot: int) -> Any: ...
    async def forward_backward(
        self, batch_id: int, slot_datums: list[Any], loss_fn: str, loss_fn_config: dict[str, float]
    ) -> Any: ...
    async def forward_only(
        self, batch_id: int, slot_datums: list[Any], loss_fn: str, loss_fn_config: dict[str, float]
    ) -> Any: ...
    async def optim_step(self, adam_params_by_slot: dict[int, dict[str, float]]) -> Any: ...
    async def save_slot(self, slot: int, path: str) -> Any: ...
    async def export_slot(self, slot: int, rank: int, alpha: float, path: str) -> Any: ...


@dataclass(slots=True)
class SlotModel:
    """A model and the slot that holds its adapter."""

    slot: int
    spec: LoraSpec
    num_steps: int = 0


class MilesRank:
    """The only rank of a group that Miles trains. Methods as `train_rank.MegatronRank`'s."""

    def __init__(self, settings: RankSettings):
        plan = settings.plan
        if plan.lora_rank is None:
            raise ConfigError("Miles trains adapters only; cluster.trainer must be megatron")
        if plan.rollout.colocated:
            raise ConfigError(
                "Miles does not offload its GPUs for sampling; give sampling GPUs of its own"
            )
        self._settings = settings
        self._max_rank = plan.lora_rank
        self._loop = _Loop()
        self._executor: Executor = self._loop.run(start_executor(settings))
        self._models: dict[str, SlotModel] = {}
        self._free = list(range(settings.resident_adapters))
        self._batch_ids = itertools.count(1)

    # ---- models

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """A new adapter; Miles draws it without a seed."""
        logger.warning(
            "model %s: Miles has no seed per adapter, %d is ignored", model_id, spec.seed
        )
        self._load(model_id, SlotModel(self._slot_for(model_id, spec), spec), None)

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> LoraSpec:
        """Raises UserError for a checkpoint that Miles did not write."""
        state = read_state(folder)
        native = folder / NATIVE_FOLDER
        if not native.is_dir():
            raise UserError(
                "this checkpoint was written by another trainer, or without its optimizer, and "
                "Miles reads only its own"
            )
        model = SlotModel(self._slot_for(model_id, state.lora), state.lora)
        model.num_steps = state.num_steps if with_optimizer else 0
        self._load(model_id, model, native, with_optimizer=with_optimizer)
        return state.lora

    def delete(self, model_id: str) -> None:
        model = self._models.pop(model_id, None)
        if model is not None:
            self._run(self._executor.unload_slot(model.slot))
            self._free.append(model.slot)

    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        model = self._get(model_id)
        self.export(model_id, folder, form="adapter")
        if with_optimizer:
            native = folder / NATIVE_FOLDER
            self._run(self._executor.save_slot(model.slot, str(native)))
            _replace_link(native)
        # with_optimizer False: our trainers cannot read Miles' moments, and must refuse them.
        state = TrainingState(self._settings.base_model, model.spec, model.num_steps, False)
        write_state(state, folder)

    def _slot_for(self, model_id: str, spec: LoraSpec) -> int:
        if not 0 < spec.rank <= self._max_rank:
            raise UserError(f"rank must be between 1 and {self._max_rank}, not {spec.rank}")
        if not (spec.train_attn and spec.train_mlp and spec.train_unembed):
            raise UserError("Miles adapts attention, MLP and unembedding together")
        self.delete(model_id)
        if not self._free:
            raise UserError(
                f"Miles holds {len(self._models)} adapters at a time; end one of them first"
            )
        return min(self._free)

    def _load(
        self, model_id: str, model: SlotModel, native: Path | None, *, with_optimizer: bool = False
    ) -> None:
        spec, path = model.spec, None if native is None else str(native)
        self._run(self._executor.load_slot(model.slot, spec.rank, spec.alpha, path, with_optimizer))
        self._free.remove(model.slot)
        self._models[model_id] = model

    def _get(self, model_id: str) -> SlotModel:
        if model_id not in self._models:
            raise ModelStateLost(model_id)
        return self._models[model_id]

    # ---- training

    def forward_backward_only(self, model_id: str, batch: TrainBatch) -> RankOutput:
        return self._pass(self._executor.forward_backward, model_id, batch)

    def forward_only(self, model_id: str, batch: TrainBatch) -> RankOutput:
        return self._pass(self._executor.forward_only, model_id, batch)

    def apply_optimizer_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        model = self._get(model_id)
        adam = {name: float(value) for name, value in asdict(params).items()}
        answers = self._run(self._executor.optim_step({model.slot: adam}))
        answer: Mapping[str, float] = answers[model.slot]
        _check(answer)
        if "skipped_nonfinite" in answer:
            raise UserError("the gradient is not finite; it was dropped and no step was made")
        model.num_steps += 1
        return {"unclipped_grad_l2:mean": float(answer["grad_norm"])}

    def _pass(self, method: Any, model_id: str, batch: TrainBatch) -> RankOutput:
        if batch.loss_fn not in LOSSES:
            raise UserError(f"Miles has no loss {batch.loss_fn!r}; it has {', '.join(LOSSES)}")
        model = self._get(model_id)
        data = [(model.slot, miles_datum(datum)) for datum in batch.data]
        config = {key: float(value) for key, value in batch.loss_fn_config.items()}
        rows = self._run(method(next(self._batch_ids), data, batch.loss_fn, config))
        outputs = tuple(
            _output(datum, row, batch.loss_fn) for datum, row in zip(batch.data, rows, strict=True)
        )
        loss = float(sum(row["loss"] for row in rows))
        return RankOutput(tuple(range(len(outputs))), outputs, {"loss:sum": loss})

    # ---- weights for others

    def export(self, model_id: str | None, folder: Path, *, form: Form) -> None:
        """A PEFT folder. Raises UserError for merged weights."""
        if model_id is None or form == "merged":
            raise UserError("Miles gives adapters to engines, no merged weights")
        model, scratch = self._get(model_id), folder / ".export"
        spec = model.spec
        self._run(self._executor.export_slot(model.slot, spec.rank, spec.alpha, str(scratch)))
        for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
            shutil.copyfile(scratch / name, folder / name)
        _replace_link(scratch)
        shutil.rmtree(scratch)

    # ---- memory

    def offload(self) -> int:
        """Frees nothing: Miles has GPUs of its own."""
        return 0

    def onload(self) -> int:
        return 0

    def stats(self) -> dict[str, int]:
        return {"slots": len(self._free) + len(self._models), "free_slots": len(self._free)}

    # ---- inside

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Miles' answer. Raises EngineDied when it failed: its ranks may be in any state then."""
        try:
            answer = self._loop.run(call)
        except Exception as error:  # what it raises, it does not document
            if type(error).__name__ == "UserInputError":
                raise UserError(str(error)) from error
            raise EngineDied(f"Miles failed: {type(error).__name__}: {error}") from error
        if isinstance(answer, Mapping):
            _check(answer)
        if self._loop.run(_awaited(self._executor.trainer_dead())):
            raise EngineDied("Miles' training processes died")
        return answer


def miles_datum(datum: Datum) -> dict[str, Any]:
    """Input tokens and the last target, the targets, and the loss's inputs by Miles' names."""
    targets = datum.inputs["target_tokens"]
    if targets.ndim != 1:
        raise UserError("Miles takes one target per position")
    row: dict[str, Any] = {
        "tokens": [*datum.tokens.tolist(), int(targets[-1])],
        "target_len": len(targets),
        "target_tokens": targets.tolist(),
    }
    for ours, theirs in DATUM_KEYS.items():
        if ours in datum.inputs:
            row[theirs] = datum.inputs[ours].astype(float).tolist()
    return row


def _output(datum: Datum, row: Mapping[str, Any], loss_fn: str) -> dict[str, Any]:
    logprobs = np.asarray(row["logprobs"], np.float32)
    if loss_fn != "cross_entropy":
        return {"logprobs": logprobs}
    elementwise = (-datum.inputs["weights"] * logprobs).astype(np.float32)
    return {"logprobs": logprobs, "elementwise_loss": elementwise}


def _check(answer: Mapping[Any, Any]) -> None:
    if "error" in answer:
        raise EngineDied(f"Miles failed: {answer['error']}")


def _replace_link(folder: Path) -> None:
    """Miles publishes a folder as a link to a version next to it: put that in the link's place."""
    if folder.is_symlink():
        version = folder.resolve(strict=True)
        folder.unlink()
        version.rename(folder)


async def _awaited(answer: Any) -> Any:
    """`trainer_dead` is a coroutine in some versions of Miles and a plain method in others."""
    return await answer if asyncio.iscoroutine(answer) else answer


class _Loop:
    """An event loop for Miles, in a thread: its background tasks run on between our calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="miles", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
