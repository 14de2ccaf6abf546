"""Plans for tiny models on ranks without a GPU."""

import json
from pathlib import Path
from typing import Any

from tinkercloud.planning.plan import GIB, ClusterShape, Plan, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

MAX_TOKENS = 256


def tiny_plan(folder: Path, ranks: int, *, lora_rank: int | None = 8, **constraints: Any) -> Plan:
    """The plan for the model in `folder` on so many ranks, float32."""
    config = json.loads((folder / "config.json").read_text())
    wanted = {"max_seq_len": MAX_TOKENS, "microbatch_tokens": MAX_TOKENS, "dtype": "float32"}
    builder = SlimeArgumentBuilder(ClusterShape(ranks, ranks, 16 * GIB))
    return builder.build(config, PlanConstraints(lora_rank=lora_rank, **{**wanted, **constraints}))
