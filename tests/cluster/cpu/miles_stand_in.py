"""What the tests install as `miles`: the one engine of which there is no real one to run.

Miles is not on the package index and needs GPUs at import. This keeps the contract of its Tinker
gateway, arguments included, around a model small enough to check by hand: in every slot one logit
per token, whatever the context. Versions of a folder are published as links, as Miles does.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

VOCAB = 300
ACTOR_ROLE = "actor"

INTEGERS = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups"),
    *("kv-channels", "vocab-size", "max-position-embeddings", "tensor-model-parallel-size"),
    *("pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"),
    *("expert-tensor-parallel-size", "recompute-num-layers", "num-experts", "lora-rank"),
    *("moe-ffn-hidden-size", "moe-router-topk", "multi-lora-n-adapters", "max-tokens-per-gpu"),
    *("actor-num-nodes", "actor-num-gpus-per-node", "moe-shared-expert-intermediate-size"),
)
NUMBERS = (
    *("norm-epsilon", "rotary-base", "rotary-percent", "attention-dropout", "hidden-dropout"),
    *("lora-dropout", "lora-alpha", "lr", "moe-router-topk-scaling-factor"),
)
TEXTS = (
    *("hf-checkpoint", "load", "normalization", "position-embedding-type", "optimizer"),
    *("megatron-to-hf-mode", "recompute-granularity", "recompute-method", "moe-router-dtype"),
    *("moe-router-score-function", "moe-token-dispatcher-type"),
)
FLAGS = (
    *("swiglu", "disable-bias-linear", "group-query-attention", "add-qkv-bias", "qk-layernorm"),
    *("accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32", "sequence-parallel"),
    *("no-gradient-accumulation-fusion", "use-dynamic-batch-size", "debug-train-only", "bf16"),
    *("untie-embeddings-and-output-weights", "use-rope-scaling", "moe-router-pre-softmax"),
    "moe-grouped-gemm",
)


def parse_args(add_custom_arguments: Any, *, entry: str, preprocess_args: Any) -> Any:
    assert entry == "serve"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for names, kind in ((INTEGERS, int), (NUMBERS, float), (TEXTS, str)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    args = add_custom_arguments(parser).parse_args(sys.argv[1:])
    preprocess_args(args)
    return args


def add_tinker_arguments(parser: Any) -> Any:
    parser.add_argument("--tinker-train-attn", default=True)
    return parser


def configure_tinker_args(args: Any) -> None:
    args.target_modules = "q_proj,lm_head"


class Disposer:
    def __init__(self) -> None:
        self.added: list[Any] = []

    def add(self, one: Any) -> None:
        self.added.append(one)


def init_orchestration_script(args: Any, *, disposer: Disposer) -> None:
    disposer.add("worker manager")


def compute_trainer_configs(args: Any) -> list[Any]:
    return [SimpleNamespace(role=ACTOR_ROLE, trainer_id="trainer")]


def create_trainer_handles(args: Any, *, trainer_configs: list[Any]) -> dict[str, Any]:
    return {config.trainer_id: Trainer(args) for config in trainer_configs}


def compute_trainer_args(args: Any, config: Any) -> Any:
    return args


class Trainer:
    """Slots of Adam-trained logits."""

    def __init__(self, args: Any):
        self.args = args
        self.slots: dict[int, dict[str, Any]] = {}
        self.dead = self.ready = False

    async def init(self, args: Any) -> None:
        assert args.use_dynamic_global_batch_size
        assert args.delay_split_train_data_by_dp
        self.ready = True


class UserInputError(Exception):
    pass


class MilesBackend:
    def __init__(self, trainer: Trainer, router_url: str, dp_size: int = 1):
        assert trainer.ready
        self.trainer = trainer
        self.dp_size = dp_size
        self.batch_ids: list[int] = []

    async def trainer_dead(self) -> bool:
        return self.trainer.dead

    async def load_slot(
        self,
        slot: int,
        rank: int,
        alpha: float,
        ckpt_path: str | None = None,
        load_optimizer: bool = True,
    ) -> dict[str, str] | None:
        if slot in self.trainer.slots or slot >= self.trainer.args.multi_lora_n_adapters:
            return {"error": f"slot {slot} is not free"}
        model: dict[str, Any] = {name: np.zeros(VOCAB) for name in ("w", "m", "v", "grad")}
        model |= {"step": 0, "rank": rank, "alpha": alpha}
        if ckpt_path is not None:
            saved = load_file(Path(ckpt_path) / "slot.safetensors")
            names = ("w", "m", "v") if load_optimizer else ("w",)
            model |= {name: saved[name] for name in names}
            model["step"] = int(saved["step"][0]) if load_optimizer else 0
        self.trainer.slots[slot] = model
        return None

    async def unload_slot(self, slot: int) -> None:
        del self.trainer.slots[slot]

    async def forward_backward(self, batch_id: int, rows: list, loss: str, config: dict) -> list:
        return self._run(batch_id, rows, loss, backward=True)

    async def forward_only(self, batch_id: int, rows: list, loss: str, config: dict) -> list:
        return self._run(batch_id, rows, loss, backward=False)

    def _run(self, batch_id: int, rows: list, loss_fn: str, *, backward: bool) -> list:
        assert batch_id not in self.batch_ids
        self.batch_ids.append(batch_id)
        told = []
        for slot, datum in rows:
            model = self.trainer.slots[slot]
            targets = datum["target_tokens"]
            if max(targets) >= VOCAB:
                raise UserInputError("target_tokens out of range")
            assert datum["tokens"][-1] == targets[-1]
            assert len(datum["tokens"]) == datum["target_len"] + 1
            laws = model["w"] - np.log(np.exp(model["w"]).sum())
            logprobs = laws[targets]
            if loss_fn == "cross_entropy":
                slope = -np.array(datum["weights"])
                loss = float((slope * logprobs).sum())
            else:
                ratio = np.exp(logprobs - np.array(datum["sampling_logprobs"]))
                slope = -ratio * np.array(datum["advantages"])
                loss = float(slope.sum())
            if backward:
                np.add.at(model["grad"], targets, slope)
                model["grad"] -= np.exp(laws) * slope.sum()
            told.append({"loss": loss, "logprobs": logprobs.tolist()})
        return told

    async def optim_step(self, params: dict[int, dict[str, float]]) -> dict[int, dict]:
        outcomes: dict[int, dict] = {}
        for slot, adam in params.items():
            model = self.trainer.slots[slot]
            gradient, model["grad"] = model["grad"], np.zeros(VOCAB)
            norm = float(np.sqrt((gradient**2).sum()))
            if not np.isfinite(norm):
                outcomes[slot] = {"skipped_nonfinite": 1.0}
                continue
            model["step"] += 1
            model["m"] = adam["beta1"] * model["m"] + (1 - adam["beta1"]) * gradient
            model["v"] = adam["beta2"] * model["v"] + (1 - adam["beta2"]) * gradient**2
            mean = model["m"] / (1 - adam["beta1"] ** model["step"])
            root = np.sqrt(model["v"] / (1 - adam["beta2"] ** model["step"])) + adam["eps"]
            model["w"] = model["w"] - adam["learning_rate"] * mean / root
            outcomes[slot] = {"grad_norm": norm}
        return outcomes

    async def save_slot(self, slot: int, path: str, metadata: dict | None = None) -> None:
        model = self.trainer.slots[slot]
        folder = _published(Path(path))
        arrays = {name: model[name] for name in ("w", "m", "v")}
        save_file(arrays | {"step": np.array([model["step"]])}, folder / "slot.safetensors")

    async def export_slot(
        self, slot: int, rank: int, alpha: float, path: str, metadata: dict | None = None
    ) -> None:
        folder = _published(Path(path))
        save_file({"w": self.trainer.slots[slot]["w"]}, folder / "adapter_model.safetensors")
        config = {"r": rank, "lora_alpha": alpha}
        (folder / "adapter_config.json").write_text(json.dumps(config))


def _published(path: Path) -> Path:
    version = path.parent / f"_version_{path.name}_1"
    version.mkdir(parents=True)
    path.symlink_to(version.name)
    return version


def install(folder: Path, targets: dict[str, str]) -> None:
    """A package `miles` in `folder` whose modules hold what `targets` name."""
    for target in targets.values():
        module, _, name = target.partition(":")
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"from tests.cluster.cpu.miles_stand_in import {name}\n")
