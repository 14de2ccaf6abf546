"""Bytes per rank: by hand for small cases, and in the proportions that sharding must have."""

from dataclasses import replace

import pytest

from tests.planning.public_configs import TRAINABLE, public_config
from tinkercloud.core.types import LoraSpec, num_trained
from tinkercloud.planning import memory_estimate as memory
from tinkercloud.planning.model_shape import ModelShape
from tinkercloud.planning.model_table import read_shape
from tinkercloud.planning.plan import GIB, ClusterShape, Layout

ONE = Layout(1, 1, 1, 1, 1, 1, False, "none", 4096)


def shape(name: str) -> ModelShape:
    return read_shape(public_config(name))


def held_parameters(network: ModelShape, layout: Layout) -> int:
    """Over all ranks that hold different weights."""
    total = 0
    for stage in memory.stages(network, layout.pp):
        dense, experts = memory.stage_parameters(network, layout, stage)
        total += dense * layout.tp + experts * layout.ep * layout.etp
    return total


@pytest.mark.parametrize("name", TRAINABLE)
def test_one_rank_alone_holds_every_parameter(name):
    network = shape(name)
    assert held_parameters(network, ONE) == network.parameters


def test_pipeline_stages_hold_every_parameter_once():
    network = shape("Qwen3-235B-A22B")
    assert held_parameters(network, replace(ONE, pp=4)) == network.parameters


def test_a_tied_table_lies_on_both_ends_of_a_pipeline():
    network = shape("Llama-3.2-1B")
    twice = held_parameters(network, replace(ONE, pp=2)) - network.parameters
    assert twice == network.vocab_size * network.hidden


def test_tensor_parallelism_repeats_norms_and_routers_only():
    network = shape("Qwen3-30B-A3B")
    more = held_parameters(network, replace(ONE, tp=2, ep=4)) - network.parameters
    router = 128 * 2048
    assert more == 48 * (2 * 2048 + 2 * 128 + router) + 2048


def test_full_training_of_an_8b_takes_18_bytes_a_parameter_on_one_rank():
    held = memory.training(shape("Llama-3.1-8B"), ONE, None)
    count = 8_030_261_248
    assert (held.weights, held.gradients, held.optimizer) == (2 * count, 4 * count, 12 * count)


def test_float32_weights_are_their_own_main_copy():
    held = memory.training(shape("Llama-3.1-8B"), ONE, None, "float32")
    count = 8_030_261_248
    assert (held.weights, held.gradients, held.optimizer) == (4 * count, 4 * count, 8 * count)


def test_the_optimizer_is_shared_out_over_replicas_and_gradients_are_not():
    alone = memory.training(shape("Llama-3.1-8B"), ONE, None)
    eight = memory.training(shape("Llama-3.1-8B"), replace(ONE, dp=8), None)
    assert eight.optimizer == alone.optimizer // 8
    assert eight.gradients == alone.gradients


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_an_adapter_of_a_whole_network_is_that_of_its_one_rank(name: str):
    network = shape(name)
    on_rank = memory.stage_adapters(network, ONE, 32, memory.stages(network, 1)[0])
    served = memory.adapter_sizes(network)
    assert num_trained(LoraSpec(32, 0), network.parameters, served) == sum(on_rank)
    no_mlp = LoraSpec(32, 0, train_mlp=False)
    assert num_trained(no_mlp, network.parameters, served) == on_rank[0] - 32 * served.mlp


def test_experts_are_shared_out_over_their_own_replicas():
    network = shape("Qwen3-30B-A3B")
    layout = replace(ONE, dp=8, ep=4)
    stage = memory.stages(network, 1)[0]
    dense, experts = memory.stage_parameters(network, layout, stage)
    assert experts == 48 * 128 * 3 * 768 * 2048 // 4
    held = memory.training(network, layout, None)
    assert held.optimizer == 12 * dense // 8 + 12 * experts // 2


def test_adapters_of_four_models_are_held_and_freeze_the_rest():
    held = memory.training(shape("Llama-3.1-8B"), ONE, 32)
    layer = 2 * 8192 + 2 * 5120 + 3 * 18432
    assert held.adapters == (4 * 16 + 4) * 32 * (32 * layer + 4096 + 128256)
    assert held.gradients == held.optimizer == 0


def test_activations_of_a_dense_layer_are_the_tensors_counted_by_hand():
    network = replace(shape("Llama-3.1-8B"), layers=1, expert_layers=(False,))
    held = memory.training(network, ONE, 8).activations
    # Norm inputs and outputs; query and key twice, value, output; gate, up and their product.
    layer = 4 * 4096 + (3 * 32 + 3 * 8) * 128 + 3 * 14336
    logits = 12 * memory.LOGITS_CHUNK_TOKENS * 128256
    assert held == 2 * 4096 * (layer + 2 * 4096) + logits


def test_recomputation_keeps_layer_inputs_and_one_layer():
    network = shape("Llama-3.1-8B")
    again = memory.training(network, replace(ONE, recompute="full"), 8).activations
    layer = 4 * 4096 + (3 * 32 + 3 * 8) * 128 + 3 * 14336
    logits = 12 * memory.LOGITS_CHUNK_TOKENS * 128256
    assert again == 2 * 4096 * (32 * 4096 + layer + 2 * 4096) + logits


def test_the_first_stage_holds_a_micro_batch_for_each_stage():
    network = shape("Llama-3.1-70B")
    flying = memory.training(network, replace(ONE, pp=4), 8).activations
    border = 2 * 4096 * 2 * 8192
    quarter = replace(network, layers=20, expert_layers=(False,) * 20)
    logits = 12 * memory.LOGITS_CHUNK_TOKENS * 128256
    single = memory.training(quarter, ONE, 8).activations - logits
    assert flying - border == 4 * (single - border)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (replace(ONE, tp=8, sequence_parallel=True), {"tp": 4}),
        (replace(ONE, cp=4), {"cp": 2}),
        (replace(ONE, pp=4), {"pp": 2}),
    ],
)
def test_more_parallelism_never_holds_more(layout, more):
    network = shape("Llama-3.1-70B")
    less = memory.training(network, replace(layout, **more), None)
    assert memory.training(network, layout, None).total < less.total


def test_latent_attention_keeps_its_compressed_form_in_the_cache():
    assert memory.kv_token_bytes(shape("DeepSeek-V3"), 8) == 2 * 61 * (512 + 64)
    assert memory.kv_token_bytes(shape("Llama-3.1-8B"), 1) == 2 * 32 * 2 * 8 * 128
    assert memory.kv_token_bytes(shape("Llama-3.1-8B"), 8) == 2 * 32 * 2 * 128


def test_key_value_heads_are_repeated_where_engines_have_more_gpus():
    network = shape("Qwen3-235B-A22B")
    doubled = replace(network, kv_heads=8)
    assert memory.rollout_weights(network, 8) == memory.rollout_weights(doubled, 8)
    assert memory.rollout_weights(network, 4) < memory.rollout_weights(doubled, 4)


@pytest.mark.parametrize("name", TRAINABLE)
def test_an_engine_of_one_gpu_holds_every_parameter(name):
    network = shape(name)
    assert memory.rollout_weights(network, 1) == 2 * network.parameters


def test_a_colocated_gpu_has_two_contexts():
    assert memory.processes_bytes(True) == 2 * memory.processes_bytes(False)
    assert memory.usable_bytes(ClusterShape(1, gpu_memory_bytes=100 * GIB)) == 94 * GIB
