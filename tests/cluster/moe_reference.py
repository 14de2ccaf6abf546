"""Mixture-of-experts training by transformers and autograd: slow, obvious, one sequence at a time.

The embedded backend has no experts; this plays the same scripts. Adapters are merged into the
weights inside the graph, W + (alpha / r) B A, so that autograd gives the gradients of A and B.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tests.cluster.rank_scripts import Op
from tinkercloud.core.types import TrainBatch, TrainOutput
from tinkercloud.embedded.training.optimizer import AdamW
from tinkercloud.losses import load_loss

PREFIX = "base_model.model."


class MoeReference:
    def __init__(self, folder: Path):
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._base = load_file(folder / "model.safetensors")
        self._num_experts = self._model.config.num_experts

    def play(self, script: list[Op]) -> list[Any]:
        return [self._op(op) for op in script]

    def _op(self, op: Op) -> Any:
        match op:
            case ("load", _, folder, False):
                self._params = {
                    n.removeprefix(PREFIX).removesuffix(".weight"): t.requires_grad_()
                    for n, t in load_file(folder / "adapter_model.safetensors").items()
                }
                self._alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
                self._begin()
            case ("create", _, spec):
                assert spec.rank == 0
                self._params = {n: t.clone().requires_grad_() for n, t in self._base.items()}
                self._begin()
            case ("fb", _, batch):
                return self._forward_backward(batch)
            case ("step", _, params):
                grads, self._grads = self._grads, {}
                return self._optimizer.step(grads, params)
            case ("save", _, folder, True):
                self._save(folder)
        return None

    def _begin(self) -> None:
        self._grads: dict[str, Tensor] = {}
        self._optimizer = AdamW({n: p.detach() for n, p in self._params.items()})

    def _weights(self) -> dict[str, Tensor]:
        """By transformers' own names, which stack the experts."""
        merged = {**self._base, **{n: p for n, p in self._params.items() if n in self._base}}
        for name, a in self._params.items():
            if name.endswith(".lora_A"):
                module = name.removesuffix(".lora_A")
                delta = self._params[f"{module}.lora_B"] @ a * (self._alpha / a.shape[0])
                merged[f"{module}.weight"] = merged[f"{module}.weight"] + delta
        return {name: self._stacked(name, merged) for name in self._model.state_dict()}

    def _stacked(self, name: str, merged: dict[str, Tensor]) -> Tensor:
        path, _, leaf = name.rpartition(".")
        if not path.endswith("mlp.experts"):
            return merged[name]
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        each = [
            torch.cat([merged[f"{path}.{e}.{part}.weight"] for part in parts])
            for e in range(self._num_experts)
        ]
        return torch.stack(each)

    def _forward_backward(self, batch: TrainBatch) -> TrainOutput:
        weights, loss_of = self._weights(), load_loss(batch.loss_fn)
        outputs, total = [], torch.zeros((), dtype=torch.float64)
        for datum in batch.data:
            tokens = torch.from_numpy(datum.tokens.astype(np.int64))[None]
            logits = functional_call(self._model, weights, (tokens,)).logits[0]
            targets = torch.from_numpy(datum.inputs["target_tokens"])
            wide = targets if targets.dim() == 2 else targets[:, None]
            logprobs = torch.log_softmax(logits, -1).gather(1, wide).view(targets.shape)
            inputs = {
                n: torch.from_numpy(v) for n, v in datum.inputs.items() if n != "target_tokens"
            }
            elementwise = loss_of(logprobs, inputs, batch.loss_fn_config)
            total = total + elementwise.double().sum()
            outputs.append({"logprobs": logprobs.detach().numpy()})
            if batch.loss_fn == "cross_entropy":
                outputs[-1]["elementwise_loss"] = elementwise.detach().numpy()
        grads = torch.autograd.grad(total, list(self._params.values()), allow_unused=True)
        for name, grad in zip(self._params, grads, strict=True):
            if grad is not None:
                self._grads[name] = self._grads[name] + grad if name in self._grads else grad
        return TrainOutput(tuple(outputs), {"loss:sum": float(total.detach())})

    def _save(self, folder: Path) -> None:
        """The tensors alone, under the names of a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        short = {n.removesuffix(".weight"): n for n in self._params}
        own = {n: self._params[full].detach() for n, full in short.items()}
        if any(".lora_" in n for n in own):
            own = {f"{PREFIX}{n}.weight": t for n, t in own.items()}
        state = {
            f"{kind}.{n.removesuffix('.weight')}": t
            for kind in ("exp_avg", "exp_avg_sq")
            for n, t in getattr(self._optimizer, kind).items()
        }
        save_file(
            {n: t.contiguous() for n, t in {**own, **state}.items()}, folder / "all.safetensors"
        )
