"""A rank with MegatronRank's interface around a model small enough to check by hand: one logit per
token, whatever the context. Ranks meet over gloo and share the datums of a batch.

TINY_FAULTS names a folder; a file METHOD-RANK-KIND in it makes that rank fail once in that method:
die (its process ends), hang, raise (this rank alone), refuse (all ranks, if all have the file).
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tinkercloud.cluster.training.rank_actors import INLINE_BYTES
from tinkercloud.cluster.training.rank_types import RankOutput, RankSettings
from tinkercloud.core.types import AdamParams, LoraSpec, TrainBatch
from tinkercloud.errors import ModelStateLost, UserError

VOCAB = 32


class TinyRank:
    def __init__(self, settings: RankSettings):
        torch.set_num_threads(1)
        self.rank, self.size = settings.rank, settings.world_size
        self.progress = 0
        self.models: dict[str, dict[str, Any]] = {}
        self._fault("start")
        dist.init_process_group(
            "gloo",
            init_method=settings.init_method,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=settings.timeout_s),
        )

    def _fault(self, method: str) -> None:
        folder = os.environ.get("TINY_FAULTS")
        for path in Path(folder).glob(f"{method}-{self.rank}-*") if folder else ():
            path.unlink()
            kind = path.name.rpartition("-")[2]
            if kind == "die":
                os._exit(1)
            elif kind == "hang":
                time.sleep(3600)
            elif kind == "crawl":
                for _ in range(30):
                    time.sleep(0.5)
                    self.progress += 1
            elif kind == "refuse":
                raise UserError("refused as told")
            else:
                raise RuntimeError("this rank alone")

    def _model(self, model_id: str) -> dict[str, Any]:
        if model_id not in self.models:
            raise ModelStateLost(model_id)
        return self.models[model_id]

    def create(self, model_id: str, spec: LoraSpec) -> None:
        self._fault("create")
        zeros = {name: torch.zeros(VOCAB, dtype=torch.float64) for name in ("w", "m", "v", "grad")}
        self.models[model_id] = {**zeros, "step": 0, "spec": spec}

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> LoraSpec:
        self._fault("load")
        state = json.loads((folder / "training_state.json").read_text())
        spec = LoraSpec(**state["lora"])
        self.create(model_id, spec)
        model, saved = self.models[model_id], load_file(folder / "tiny.safetensors")
        model["w"] = saved["w"]
        if with_optimizer:
            model |= {"m": saved["m"], "v": saved["v"], "step": state["num_steps"]}
        return spec

    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        self._fault("save")
        model = self._model(model_id)
        if self.rank == 0:
            save_file({name: model[name] for name in ("w", "m", "v")}, folder / "tiny.safetensors")
            lora = {"rank": model["spec"].rank, "seed": model["spec"].seed}
            state = {"num_steps": model["step"], "lora": lora}
            (folder / "training_state.json").write_text(json.dumps(state))
        dist.barrier()

    def delete(self, model_id: str) -> None:
        self._fault("delete")
        self.models.pop(model_id, None)

    def forward_backward_only(self, model_id: str, batch: TrainBatch) -> RankOutput | None:
        self._fault("forward_backward_only")
        return self._run(self._model(model_id), batch, backward=True)

    def forward_only(self, model_id: str, batch: TrainBatch) -> RankOutput | None:
        self._fault("forward_only")
        return self._run(self._model(model_id), batch, backward=False)

    def _run(self, model: dict[str, Any], batch: TrainBatch, *, backward: bool) -> RankOutput:
        mine = range(self.rank, len(batch.data), self.size)
        outputs: list[Mapping[str, np.ndarray]] = []
        total = torch.zeros((), dtype=torch.float64)
        size = sum(array.nbytes for datum in batch.data for array in datum.inputs.values())
        for index in mine:
            inputs = batch.data[index].inputs
            is_copy = inputs["weights"].flags.writeable
            assert is_copy == (size <= INLINE_BYTES), "a large one is read where it lies"
            w = model["w"].clone().requires_grad_()
            targets = torch.tensor(inputs["target_tokens"].tolist())
            logprobs = torch.log_softmax(w, -1)[targets]
            loss = -(torch.tensor(inputs["weights"].tolist()) * logprobs).sum()
            if backward:
                loss.backward()
                model["grad"] += w.grad
            total += loss.detach()
            outputs.append({"logprobs": logprobs.detach().numpy().astype(np.float32)})
        dist.all_reduce(total)
        return RankOutput(tuple(mine), tuple(outputs), {"loss:sum": float(total)})

    def apply_optimizer_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        self._fault("apply_optimizer_step")
        model = self._model(model_id)
        gradient, model["grad"] = model["grad"], torch.zeros_like(model["grad"])
        dist.all_reduce(gradient)
        self._fault("step_midway")
        model["step"] += 1
        model["m"] = params.beta1 * model["m"] + (1 - params.beta1) * gradient
        model["v"] = params.beta2 * model["v"] + (1 - params.beta2) * gradient**2
        m = model["m"] / (1 - params.beta1 ** model["step"])
        v = model["v"] / (1 - params.beta2 ** model["step"])
        model["w"] = model["w"] - params.learning_rate * m / (v.sqrt() + params.eps)
        return {"unclipped_grad_l2:mean": float(gradient.norm())}

    def export(self, model_id: str | None, folder: Path, *, form: str) -> None:
        if self.rank == 0 and model_id is not None:
            save_file({"w": self._model(model_id)["w"]}, folder / f"{form}.safetensors")
        dist.barrier()

    def checksum(self, model_id: str | None) -> str:
        return str(None if model_id is None else self._model(model_id)["w"].sum().item())

    def offload(self) -> int:
        self._fault("offload")
        return 1000

    def onload(self) -> int:
        self._fault("onload")
        return 1000

    def stats(self) -> dict[str, int]:
        return {"params_bytes": 8 * VOCAB * len(self.models)}
