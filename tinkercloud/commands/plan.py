"""`tinkercloud plan`: its options, and a plan as text."""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from tinkercloud.commands.options import Arguments, complain, say
from tinkercloud.errors import ConfigError, PlanRefused
from tinkercloud.planning.plan import GIB, ClusterShape, MemoryPhase, Plan, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

LARGEST_CONFIG_BYTES = 8 * 1024**2
SIZES = {
    "tp": "tensor parallel size",
    "pp": "pipeline stages",
    "cp": "context parallel size",
    "ep": "expert parallel size",
    "etp": "tensor parallel size inside experts",
    "dp": "data parallel replicas",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json, or that file")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of this model")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs in a machine [8]"
    )
    parser.add_argument(
        "--gpu-memory", type=float, default=80.0, metavar="GIB", help="GiB of each GPU [80]"
    )
    training = parser.add_mutually_exclusive_group()
    training.add_argument(
        "--lora-rank", type=int, default=32, metavar="R", help="largest rank of adapters [32]"
    )
    training.add_argument("--full", action="store_true", help="train all parameters, no adapters")
    parser.add_argument(
        "--max-seq-len", type=int, metavar="T", help="tokens of the longest sequence [8192]"
    )
    parser.add_argument(
        "--rollout-gpus", type=int, default=0, metavar="N", help="GPUs that only sample [0]"
    )
    parser.add_argument("--rollout-tp", type=int, metavar="N", help="GPUs of a sampling engine")
    for name, what in SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} [chosen]")
    parser.add_argument("--recompute", choices=("none", "full"), help="activations [chosen]")
    parser.add_argument(
        "--microbatch-tokens", type=int, metavar="T", help="packed tokens of a micro-batch [chosen]"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="the whole plan, for programs")
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    try:
        plan = make_plan(arguments)
    except PlanRefused as refused:
        for reason in refused.reasons:
            complain(reason)
        return 2
    say(as_json(plan) if arguments["json"] else as_text(plan))
    return 0


def make_plan(arguments: Mapping[str, Any]) -> Plan:
    """Raises ConfigError where the config cannot be read, PlanRefused where no plan is possible."""
    cluster = ClusterShape(
        gpus=arguments["gpus"],
        gpus_per_node=arguments["gpus_per_node"],
        gpu_memory_bytes=_bytes(arguments["gpu_memory"]),
    )
    same = ("max_seq_len", "rollout_gpus", "rollout_tp", "recompute", "microbatch_tokens", "dtype")
    constraints = PlanConstraints(
        lora_rank=None if arguments["full"] else arguments["lora_rank"],
        **{name: arguments[name] for name in (*SIZES, *same)},
    )
    return SlimeArgumentBuilder(cluster).build(read_config(Path(arguments["model"])), constraints)


def _bytes(gib: float) -> int:
    if not 0 < gib < 2**20:
        raise ConfigError(f"--gpu-memory {gib}: GiB of one GPU, above 0")
    return int(gib * GIB)


def read_config(path: Path) -> Mapping[str, Any]:
    """The config.json at `path` or in that folder."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        raise ConfigError(f"{path} is neither a folder with a config.json nor that file")
    try:
        if file.stat().st_size > LARGEST_CONFIG_BYTES:
            raise ConfigError(f"{file} is too large for a config.json")
        tree: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is no JSON object")
    return cast(Mapping[str, Any], tree)


def as_json(plan: Plan) -> str:
    return json.dumps(plan.to_json(), indent=2)


def as_text(plan: Plan) -> str:
    """What the plan is, what each GPU holds in each phase, and why."""
    return "\n".join([*_facts(plan), "", *_memory(plan), "", "why", *_indented(plan.reasons)])


def _facts(plan: Plan) -> Iterable[str]:
    lay, roll = plan.layout, plan.rollout
    adapters = "full-parameter" if plan.lora_rank is None else f"LoRA rank {plan.lora_rank}"
    if plan.expert_lora_rank:
        adapters += f", {plan.expert_lora_rank} in experts"
    experts = f", ep {lay.ep}, etp {lay.etp}" if plan.megatron.num_moe_experts else ""
    where = "in turn with training" if roll.colocated else "apart from training"
    rows = {
        "model": f"{plan.architecture}, {_count(plan.parameters)} parameters, "
        f"{_count(plan.active_parameters)} active, {_count(plan.trained_parameters)} trained",
        "cluster": f"{plan.cluster.gpus} GPUs, {plan.cluster.gpus_per_node} in a node, "
        f"{plan.cluster.gpu_memory_bytes / GIB:.0f} GiB each",
        "training": f"{adapters}, sequences up to {plan.max_seq_len} tokens",
        "layout": f"tp {lay.tp}, pp {lay.pp}, cp {lay.cp}, dp {lay.dp}{experts}; "
        f"{lay.world} ranks; recompute {lay.recompute}",
        "sampling": f"{roll.engines} engine(s) of {roll.tp} GPU(s), {where}; "
        f"cache of {roll.kv_tokens} tokens each",
    }
    return (f"{name.ljust(9)} {text}" for name, text in rows.items())


def _memory(plan: Plan) -> Iterable[str]:
    yield f"GiB on the fullest GPU, of {plan.usable_bytes / GIB:.1f} usable"
    for phase in plan.phases:
        yield f"  {phase.name.ljust(10)}{_gib(phase.total)}  = {_parts(phase)}"


def _parts(phase: MemoryPhase) -> str:
    return " + ".join(f"{name} {size / GIB:.1f}" for name, size in phase.parts if size)


def _gib(size: int) -> str:
    return f"{size / GIB:7.1f}"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{name}"
    return str(number)


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"  {line}" for line in lines)
