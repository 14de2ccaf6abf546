"""Every plan's arguments against Megatron-core's own checks."""

from dataclasses import replace

import pytest

from tests.planning.public_configs import TRAINABLE, public_config
from tinkercloud.cluster.training.megatron_model import RankHooks, transformer_config
from tinkercloud.errors import PlanRefused
from tinkercloud.planning.plan import ClusterShape, Plan, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

# Megatron-core's own imports speak of torch.jit and of engines that are not installed here.
pytestmark = pytest.mark.filterwarnings("ignore")

GPUS = (1, 8, 24, 64, 512)


def plans(name: str) -> list[Plan]:
    found = []
    for gpus in GPUS:
        for rank in (32, None):
            try:
                constraints = PlanConstraints(lora_rank=rank)
                plan = SlimeArgumentBuilder(ClusterShape(gpus)).build(
                    public_config(name), constraints
                )
            except PlanRefused:
                continue
            found.append(plan)
    return found


@pytest.mark.parametrize("name", TRAINABLE)
def test_megatron_accepts_the_arguments_of_every_plan(name):
    made = plans(name)
    assert made, "no plan at all to be checked"
    for plan in made:
        # Transformer Engine's spec is built on GPUs only; its config is checked anywhere.
        config = transformer_config(plan.megatron, RankHooks())
        stages = config.pipeline_model_parallel_size
        last = config.num_layers_in_last_pipeline_stage or config.num_layers // stages
        others = config.num_layers - last
        assert others % max(1, stages - 1) == 0 and last > 0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("Llama-3.1-8B", {"tensor_model_parallel_size": 3}), ("Qwen3-8B", {"num_query_groups": 5})],
)
def test_megatron_would_have_refused_what_does_not_divide(name, wrong):
    plan = SlimeArgumentBuilder(ClusterShape(8)).build(public_config(name), PlanConstraints(tp=2))
    with pytest.raises(ValueError, match="must be a multiple"):
        transformer_config(replace(plan.megatron, **wrong), RankHooks())
