"""An installed Miles instead of our own Megatron ranks (the setting `cluster.trainer: miles`).

`MilesRank` offers what a `MegatronRank` offers, to the same train group, as a group of one: Miles
starts its own ranks. It drives Miles by the executor contract of its Tinker gateway: adapters live
in numbered slots (load_slot, unload_slot, save_slot, export_slot), data goes as one dict per datum
(forward_backward, forward_only), and one optim_step takes Adam's parameters by slot.

Narrower than ours: adapters only, as many as there are slots; no gspo; one target per position; no
seed per adapter; memory is not given back, so that sampling needs GPUs of its own. A checkpoint
holds the adapter in our format and, for exact resumption by Miles, its own in `miles/`.
"""

import asyncio
import itertools
import logging
import shutil
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from tinkercloud.cluster.training.miles_start import start_executor
from tinkercloud.cluster.training.rank_types import RankOutput, RankSettings
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
ADAM_KEYS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


class Executor(Protocol):
    """Miles' contract, as far as it is used. An answer may be {"error": text}."""

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
class Held:
    """A model in its slot."""

    slot: int
    spec: LoraSpec
    num_steps: int = 0


class MilesRank:
    """The one rank of a group that Miles trains. Methods as `train_rank.MegatronRank`'s."""

    def __init__(self, settings: RankSettings):
        plan = settings.plan
        if plan.lora_rank is None:
            raise ConfigError("Miles trains adapters only; cluster.trainer must be megatron")
        if plan.rollout.colocated:
            raise ConfigError(
                "Miles does not give its GPUs to sampling in turn; give sampling GPUs of its own"
            )
        self._settings = settings
        self._max_rank = plan.lora_rank
        self._loop = _Loop()
        self._executor: Executor = self._loop.run(start_executor(settings))
        self._models: dict[str, Held] = {}
        self._free = list(range(settings.resident_adapters))
        self._batch_ids = itertools.count(1)

    # ---- models

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """A fresh adapter; Miles draws it, whatever the seed."""
        logger.warning(
            "model %s: Miles has no seed per adapter, %d is ignored", model_id, spec.seed
        )
        self._enter(model_id, Held(self._slot_for(model_id, spec), spec), None)

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> LoraSpec:
        """Raises UserError for a checkpoint that Miles did not write."""
        state = read_state(folder)
        native = folder / NATIVE_FOLDER
        if not native.is_dir():
            raise UserError(
                "this checkpoint was written by another trainer, or without its optimizer, and "
                "Miles reads only its own"
            )
        held = Held(self._slot_for(model_id, state.lora), state.lora)
        held.num_steps = state.num_steps if with_optimizer else 0
        self._enter(model_id, held, native, with_optimizer=with_optimizer)
        return state.lora

    def delete(self, model_id: str) -> None:
        held = self._models.pop(model_id, None)
        if held is not None:
            self._ask(self._executor.unload_slot(held.slot))
            self._free.append(held.slot)

    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        held = self._get(model_id)
        self.export(model_id, folder, form="adapter")
        if with_optimizer:
            native = folder / NATIVE_FOLDER
            self._ask(self._executor.save_slot(held.slot, str(native)))
            _settle(native)
        # Our trainers cannot read Miles' moments: for them it has no optimizer.
        state = TrainingState(self._settings.base_model, held.spec, held.num_steps, False)
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

    def _enter(
        self, model_id: str, held: Held, native: Path | None, *, with_optimizer: bool = False
    ) -> None:
        spec, path = held.spec, None if native is None else str(native)
        self._ask(self._executor.load_slot(held.slot, spec.rank, spec.alpha, path, with_optimizer))
        self._free.remove(held.slot)
        self._models[model_id] = held

    def _get(self, model_id: str) -> Held:
        if model_id not in self._models:
            raise ModelStateLost(model_id)
        return self._models[model_id]

    # ---- training

    def forward_backward_only(self, model_id: str, batch: TrainBatch) -> RankOutput:
        return self._run(self._executor.forward_backward, model_id, batch)

    def forward_only(self, model_id: str, batch: TrainBatch) -> RankOutput:
        return self._run(self._executor.forward_only, model_id, batch)

    def apply_optimizer_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        held = self._get(model_id)
        wanted = {key: float(getattr(params, key)) for key in ADAM_KEYS}
        told: Mapping[str, float] = self._ask(self._executor.optim_step({held.slot: wanted}))[
            held.slot
        ]
        _refuse_failure(told)
        if "skipped_nonfinite" in told:
            raise UserError("the gradient is not finite; it was dropped and no step was made")
        held.num_steps += 1
        return {"unclipped_grad_l2:mean": float(told["grad_norm"])}

    def _run(self, method: Any, model_id: str, batch: TrainBatch) -> RankOutput:
        if batch.loss_fn not in LOSSES:
            raise UserError(f"Miles has no loss {batch.loss_fn!r}; it has {', '.join(LOSSES)}")
        held = self._get(model_id)
        data = [(held.slot, miles_datum(datum)) for datum in batch.data]
        config = {key: float(value) for key, value in batch.loss_fn_config.items()}
        told = self._ask(method(next(self._batch_ids), data, batch.loss_fn, config))
        outputs = tuple(
            _output(datum, one, batch.loss_fn) for datum, one in zip(batch.data, told, strict=True)
        )
        loss = float(sum(one["loss"] for one in told))
        return RankOutput(tuple(range(len(outputs))), outputs, {"loss:sum": loss})

    # ---- weights for others

    def export(
        self, model_id: str | None, folder: Path, *, form: Literal["adapter", "merged"]
    ) -> None:
        """A PEFT folder. Raises UserError for merged weights."""
        if model_id is None or form == "merged":
            raise UserError("Miles gives adapters to engines, no merged weights")
        held, made = self._get(model_id), folder / ".export"
        self._ask(self._executor.export_slot(held.slot, held.spec.rank, held.spec.alpha, str(made)))
        for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
            shutil.copyfile(made / name, folder / name)
        _settle(made)
        shutil.rmtree(made)

    # ---- memory

    def offload(self) -> int:
        """Nothing: Miles keeps its memory, on GPUs of its own."""
        return 0

    def onload(self) -> int:
        return 0

    def stats(self) -> dict[str, int]:
        return {"slots": len(self._free) + len(self._models), "free_slots": len(self._free)}

    # ---- inside

    def _ask(self, answer: Coroutine[Any, Any, Any]) -> Any:
        """Miles' answer. EngineDied when it failed: what its ranks hold then, nobody knows."""
        try:
            told = self._loop.run(answer)
        except Exception as error:
            if type(error).__name__ == "UserInputError":
                raise UserError(str(error)) from error
            raise EngineDied(f"Miles failed: {type(error).__name__}: {error}") from error
        if isinstance(told, Mapping):
            _refuse_failure(told)
        if self._loop.run(_awaited(self._executor.trainer_dead())):
            raise EngineDied("Miles' training processes died")
        return told


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


def _output(datum: Datum, told: Mapping[str, Any], loss_fn: str) -> dict[str, Any]:
    logprobs = np.asarray(told["logprobs"], np.float32)
    if loss_fn != "cross_entropy":
        return {"logprobs": logprobs}
    elementwise = (-datum.inputs["weights"] * logprobs).astype(np.float32)
    return {"logprobs": logprobs, "elementwise_loss": elementwise}


def _refuse_failure(told: Mapping[Any, Any]) -> None:
    if "error" in told:
        raise EngineDied(f"Miles failed: {told['error']}")


def _settle(made: Path) -> None:
    """Miles publishes a folder as a link to a version beside it; keep the folder alone."""
    if made.is_symlink():
        version = made.resolve(strict=True)
        made.unlink()
        version.rename(made)


async def _awaited(answer: Any) -> Any:
    """Asked by some versions of Miles with await, by others without."""
    return await answer if asyncio.iscoroutine(answer) else answer


class _Loop:
    """Miles' own loop, in a thread: its background tasks go on between our calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="miles", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
