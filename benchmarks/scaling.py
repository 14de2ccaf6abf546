"""A model of step time and memory on 8, 64 and 512 GPUs; writes docs/scaling.md and scaling.png.

Plans come from the planner; times from the formulas below and the assumed machine. Nothing here is
measured.

    python -m benchmarks.scaling
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from benchmarks.lib.machine import ROOT
from tinkercloud.errors import PlanRefused
from tinkercloud.planning import memory_estimate as memory
from tinkercloud.planning.model_shape import ModelShape
from tinkercloud.planning.model_table import read_shape
from tinkercloud.planning.plan import GIB, ClusterShape, Plan, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

TARGET = ROOT / "docs" / "scaling.md"
PICTURE = ROOT / "docs" / "scaling.png"
CONFIGS = ROOT / "tests" / "planning" / "configs"

MODELS = {"8B": "Llama-3.1-8B", "70B": "Llama-3.1-70B", "235B-MoE": "Qwen3-235B-A22B"}
GPUS = (8, 64, 512)
SEQ_LEN = 8192
SEQUENCES = 512  # of SEQ_LEN tokens, in one optimizer step, whatever the number of GPUs

PEAK_FLOPS = 989e12  # H100 SXM, bfloat16, dense (NVIDIA's data sheet)
DENSE_EFFICIENCY = 0.50  # of the peak, inside matrix products and attention
EXPERT_EFFICIENCY = 0.35  # the same with experts: smaller products, uneven loads
NVLINK_BYTES_S = 0.75 * 450e9  # one direction of one GPU, and the share that is reached
NETWORK_BYTES_S = 0.75 * 50e9  # 400 Gbit/s for each GPU


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step over SEQUENCES sequences, and of publishing its weights."""

    compute: float
    tensor: float
    context: float
    experts: float
    bubble: float
    gradients: float
    publish: float
    flops: float

    @property
    def communication(self) -> float:
        return self.tensor + self.context + self.experts + self.gradients

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble


def model_flops(shape: ModelShape, *, lora: bool, recompute: bool) -> float:
    """Of one sequence: 2 for each active weight and token forward, twice that backward, half of
    which is the weights' own gradient, which frozen weights do not take; causal attention."""
    tables = shape.vocab_size * shape.hidden
    weights = shape.active_parameters - (0 if shape.tied else tables)
    passes = (2 if lora else 3) + recompute
    attention = shape.layers * shape.heads * shape.head_dim * 2 * SEQ_LEN**2
    return 2 * weights * SEQ_LEN * passes + attention * (3 + recompute)


def step(shape: ModelShape, plan: Plan) -> Step:
    lay, lora = plan.layout, plan.lora_rank is not None
    recompute = lay.recompute == "full"
    rounds = ceil(SEQUENCES * SEQ_LEN / (lay.microbatch_tokens * lay.dp))
    stage = -(-shape.layers // lay.pp)
    share = stage / shape.layers / (lay.tp * lay.cp)  # of a sequence's work, on a rank
    efficiency = EXPERT_EFFICIENCY if shape.experts else DENSE_EFFICIENCY
    flops = model_flops(shape, lora=lora, recompute=recompute)
    compute = flops * share / (PEAK_FLOPS * efficiency)
    tensor, context, experts = (
        stage * each for each in _layer_seconds(shape, plan, recompute=recompute)
    )
    micro_batch = compute + tensor + context + experts
    return Step(
        compute=rounds * compute,
        tensor=rounds * tensor,
        context=rounds * context,
        experts=rounds * experts,
        bubble=(lay.pp - 1) * micro_batch,
        gradients=_gradient_seconds(shape, plan),
        publish=_publish_seconds(shape, plan),
        flops=SEQUENCES * model_flops(shape, lora=lora, recompute=False),
    )


def _layer_seconds(shape: ModelShape, plan: Plan, *, recompute: bool) -> tuple[float, float, float]:
    """Of one micro-batch in one layer: tensor, context and expert parallel traffic, none hidden."""
    lay, node = plan.layout, plan.cluster.gpus_per_node
    tokens = lay.microbatch_tokens // lay.cp
    passes = 2 + recompute  # forward, backward, forward again
    whole = 2 * tokens * shape.hidden
    # Each pass gathers and scatters around attention and around the MLP.
    tensor = 4 * passes * whole * (lay.tp - 1) / lay.tp / NVLINK_BYTES_S
    pair = 2 * tokens * 2 * shape.kv_heads * shape.head_dim / lay.tp
    ring = NVLINK_BYTES_S if lay.tp * lay.cp <= node else NETWORK_BYTES_S
    context = (passes + 1) * pair * (lay.cp - 1) / ring
    if shape.experts is None:
        return tensor, context, 0.0
    routed = whole * shape.experts.top_k / lay.tp
    near = min(lay.ep, node)
    away = routed * (lay.ep - near) / lay.ep / NETWORK_BYTES_S
    return tensor, context, 2 * passes * (away + routed * (near - 1) / lay.ep / NVLINK_BYTES_S)


def _gradient_seconds(shape: ModelShape, plan: Plan) -> float:
    """Once a step: float32 gradients scattered, bfloat16 weights (float32 adapters) gathered."""
    lay = plan.layout
    copies = lay.dp * lay.cp
    stage = memory.stages(shape, lay.pp)[0]
    if plan.lora_rank is None:
        weights, weight_bytes = sum(memory.stage_parameters(shape, lay, stage)), 4 + 2
    else:
        weights = sum(memory.stage_adapters(shape, lay, plan.lora_rank, stage))
        weight_bytes = 4 + 4
    inside = lay.tp * copies <= plan.cluster.gpus_per_node
    return (
        weight_bytes
        * weights
        * (copies - 1)
        / copies
        / (NVLINK_BYTES_S if inside else NETWORK_BYTES_S)
    )


def _publish_seconds(shape: ModelShape, plan: Plan) -> float:
    """Adapters where engines take them, else every weight, whole, into every GPU's memory once."""
    lay = plan.layout
    size = 2 * shape.parameters
    if plan.sglang.enable_lora and plan.lora_rank:
        size = 4 * plan.trained_parameters
    inside = lay.tp * lay.pp * lay.ep <= plan.cluster.gpus_per_node
    return size / (NVLINK_BYTES_S if inside else NETWORK_BYTES_S)


@dataclass(frozen=True)
class Case:
    """plan, step: None where the planner refuses; `refusal` says why."""

    model: str
    gpus: int
    full: bool
    plan: Plan | None
    step: Step | None
    refusal: str = ""


def cases() -> Iterator[Case]:
    for label, name in MODELS.items():
        config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
        shape = read_shape(config)
        for full in (False, True):
            for gpus in GPUS:
                constraints = PlanConstraints(lora_rank=None if full else 32, max_seq_len=SEQ_LEN)
                try:
                    plan = SlimeArgumentBuilder(ClusterShape(gpus)).build(config, constraints)
                except PlanRefused as refused:
                    yield Case(label, gpus, full, None, None, refused.reasons[0])
                else:
                    yield Case(label, gpus, full, plan, step(shape, plan))


HEAD = f"""# Scaling: a model, not a measurement

Made by `benchmarks/scaling.py` from the planner's layouts ([planning.md](planning.md)). **Nobody
ran these.** No figure on this page was measured on a GPU; they show what the formulas say under the
assumptions below, and where the limits would be. Expect orders, not percents.

![Step time and memory over the number of GPUs](scaling.png)

## Assumptions

- GPUs: H100 SXM, 80 GiB, {PEAK_FLOPS / 1e12:.0f} TFLOP/s dense bfloat16 by the data sheet; 8 in a
  node.
- Matrix products and attention reach {DENSE_EFFICIENCY:.0%} of that, networks with experts
  {EXPERT_EFFICIENCY:.0%}. These two numbers are guesses, and every step time is nearly proportional
  to them.
- Links, for each GPU and direction: {NVLINK_BYTES_S / 1e9:.1f} GB/s inside a node (450 GB/s NVLink,
  75 % of it), {NETWORK_BYTES_S / 1e9:.1f} GB/s between nodes (400 Gbit/s, 75 % of it). No
  latencies, no congestion.
- No communication is hidden behind computation. Real ones hide some of it.
- A step is {SEQUENCES} sequences of {SEQ_LEN} tokens ({SEQUENCES * SEQ_LEN / 2**20:.0f} Mi tokens),
  at every size: strong scaling. All sequences are full: packing wastes nothing. Experts
  are loaded evenly.
- FLOPs of a token: 2 for each active weight forward; backward 4, or 2 where weights are frozen
  (LoRA); 2 more with recomputation; causal attention on top.
- A pipeline idles for (pp - 1) micro-batches. Optimizer arithmetic, data loading, Ray and HTTP
  count nothing; [the benchmarks](benchmarks/README.md) measure what of that a CPU can show.
- Sampling time is not modelled: it depends on the lengths of what is sampled. *Publish* is the time
  to bring new weights to engines on the same GPUs: adapters where engines take them, else all
  weights.
"""

COLUMNS = (
    "model", "GPUs", "trains", "tp/pp/cp/ep/dp", "recompute", "peak GiB: train, sync, sample",
    "compute s", "communication s", "bubble s", "**step s**", "tokens/s/GPU", "MFU", "publish s",
)  # fmt: skip


def render(rows: list[Case]) -> str:
    lines = [HEAD, "## Steps", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
    lines += [_row(_cells(case)) for case in rows]
    refused = [case for case in rows if case.plan is None]
    if refused:
        lines += ["", "No plan, by the planner's words:", ""]
        lines += [f"- {c.model}, {c.gpus} GPUs, {_trains(c)}: {c.refusal}" for c in refused]
    return "\n".join([*lines, "", TAIL])


TAIL = """MFU counts a step's own FLOPs, without recomputation, over the peak of all GPUs.

## What the model says

- Adapters on 8B to 70B need no more than one node; more nodes are more replicas, and a step of this
  size gets shorter in proportion until a replica has only a few sequences left.
- Full-parameter training moves 6 bytes for each weight of a rank once a step. With 8B on 512
  GPUs, where a replica has two micro-batches, that is no longer small: larger steps, not more GPUs.
- Experts spread over several nodes pay for every routed token on the network. That, and not
  arithmetic, is what a 235B network with experts would wait for; overlap, which this model leaves
  out, matters most there.
- This model and the planner's simpler rules do not always agree: for adapters on the 235B network,
  a GPU does more where experts stay inside a node (64 GPUs, ep 8) than with what the planner takes
  at 512 (ep 16). `--pp 4 --ep 8` asks for the former there too.
- Sending whole weights of a 235B network takes seconds in every step; adapters take none to
  speak of.
"""


def _row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _trains(case: Case) -> str:
    return "all weights" if case.full else "LoRA 32"


def _cells(case: Case) -> list[str]:
    first = [case.model, str(case.gpus), _trains(case)]
    plan, seconds = case.plan, case.step
    if plan is None or seconds is None:
        return [*first, "refused", *["-"] * (len(COLUMNS) - len(first) - 1)]
    lay = plan.layout
    speed = SEQUENCES * SEQ_LEN / seconds.total / case.gpus
    return [
        *first,
        f"{lay.tp}/{lay.pp}/{lay.cp}/{lay.ep}/{lay.dp}",
        lay.recompute,
        ", ".join(f"{phase.total / GIB:.0f}" for phase in plan.phases),
        f"{seconds.compute:.1f}",
        f"{seconds.communication:.1f}",
        f"{seconds.bubble:.1f}",
        f"**{seconds.total:.1f}**",
        f"{speed:.0f}",
        f"{seconds.flops / seconds.total / case.gpus / PEAK_FLOPS:.0%}",
        f"{seconds.publish:.2f}",
    ]


def draw(rows: list[Case], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for number, label in enumerate(MODELS):
        for full in (False, True):
            lines = [c for c in rows if c.model == label and c.full == full and c.plan and c.step]
            style = {"color": f"C{number}", "linestyle": "-" if full else "--", "marker": "o"}
            name = f"{label}, {'all weights' if full else 'LoRA'}"
            gpus = [case.gpus for case in lines]
            axes[0].plot(gpus, [c.step.total for c in lines if c.step], label=name, **style)
            peaks = [c.plan.phases[0].total / GIB for c in lines if c.plan]
            axes[1].plot(gpus, peaks, label=name, **style)
    axes[0].set(yscale="log", ylabel="seconds", title="One step of 4 Mi tokens (model)")
    axes[1].axhline(80, color="gray", linewidth=1)
    axes[1].text(8, 81, "80 GiB", color="gray", va="bottom")
    axes[1].set(ylim=(0, 90), ylabel="GiB", title="Fullest GPU while it trains (estimate)")
    for plot in axes:
        plot.set(xscale="log", xlabel="GPUs (H100, assumed)", xticks=GPUS)
        plot.set_xticks(GPUS, [str(number) for number in GPUS])
        plot.minorticks_off()
        plot.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(target, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    rows = list(cases())
    TARGET.write_text(render(rows), encoding="utf-8")
    draw(rows, PICTURE)
    print(f"{TARGET.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}: {len(rows)} cases")


if __name__ == "__main__":
    main()
