"""The adapter to Miles, against a stand-in: Miles itself is not on the package index."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.cpu import miles_stand_in
from tests.cluster.cpu.tiny import PLAIN, SIZES
from tests.cluster.ray_cluster import one_node, wait_until_settled
from tests.serving import ROOT
from tinkercloud.cluster.base_models import BaseModel, BaseModels
from tinkercloud.cluster.training import miles_start
from tinkercloud.cluster.training.miles import MilesRank, miles_datum
from tinkercloud.cluster.training.rank_actors import MILES_RANK
from tinkercloud.cluster.training.rank_types import RankSettings
from tinkercloud.config import ClusterConfig, Config
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, ServedModel, TrainBatch
from tinkercloud.errors import ConfigError, EngineDied, ModelStateLost, UserError
from tinkercloud.planning.plan import GIB, ClusterShape, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

SPEC = LoraSpec(rank=4, seed=1)
ADAM = AdamParams(learning_rate=0.1)
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def plan(architecture=LLAMA, **constraints):
    config = {**SIZES, **architecture, "rope_parameters": PLAIN}
    fields = {"lora_rank": 8, "rollout_gpus": 1, "max_seq_len": 256, "tp": 2, **constraints}
    builder = SlimeArgumentBuilder(ClusterShape(3, 3, 16 * GIB))
    return builder.build(config, PlanConstraints(**fields))


def settings_of(made) -> RankSettings:
    return RankSettings(0, 1, "tcp://127.0.0.1:1", made, "tiny", Path("/models/tiny"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder on the path that holds the stand-in."""
    folder = tmp_path / "packages"
    folder.mkdir()
    miles_stand_in.install(folder, miles_start.PARTS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
        del sys.modules[name]


@pytest.fixture
def rank(installed) -> MilesRank:
    return MilesRank(settings_of(plan()))


def batch(*targets: int, loss_fn: str = "cross_entropy") -> TrainBatch:
    """One datum for each target; datum i has i + 1 tokens."""
    inputs = {
        "cross_entropy": {"weights": 1.0},
        "importance_sampling": {"logprobs": -5.0, "advantages": 2.0},
    }[loss_fn]
    data = [
        Datum(
            np.full(i + 1, 3, np.int32),
            {"target_tokens": np.full(i + 1, target, np.int64)}
            | {name: np.full(i + 1, value, np.float32) for name, value in inputs.items()},
        )
        for i, target in enumerate(targets)
    ]
    return TrainBatch(tuple(data), loss_fn)


def trained(rank: MilesRank, model_id: str, target: int, steps: int = 1) -> float:
    """The loss after some steps."""
    for _ in range(steps):
        rank.forward_backward_only(model_id, batch(target))
        rank.apply_optimizer_step(model_id, ADAM)
    return rank.forward_only(model_id, batch(target)).metrics["loss:sum"]


class TestWithoutMiles:
    def test_the_error_says_how_to_install_it(self):
        with pytest.raises(ConfigError, match=r"not on the package index.*radixark/miles"):
            MilesRank(settings_of(plan()))

    def test_another_miles_is_refused_by_what_it_lacks(self, tmp_path, monkeypatch):
        targets = dict(miles_start.PARTS)
        del targets["MilesBackend"]
        miles_stand_in.install(tmp_path, targets)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        try:
            with pytest.raises(ConfigError, match=r"no miles\.tinker\.runtime:MilesBackend"):
                MilesRank(settings_of(plan()))
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
                del sys.modules[name]

    def test_full_parameter_training_is_refused(self):
        with pytest.raises(ConfigError, match="adapters only"):
            MilesRank(settings_of(replace(plan(), lora_rank=None)))

    def test_a_shared_gpu_is_refused(self):
        with pytest.raises(ConfigError, match="sampling GPUs of its own"):
            MilesRank(settings_of(plan(rollout_gpus=0, tp=1, dp=3)))


class TestAsASetting:
    SHAPE = ClusterShape(3, 3, 16 * GIB)

    def models(self, folder: Path, rollout_gpus: int = 1) -> BaseModels:
        cluster = ClusterConfig(trainer="miles", rollout_gpus=rollout_gpus)
        return BaseModels(Config(data_dir=folder, cluster=cluster), self.SHAPE)

    def test_it_is_refused_at_the_start_where_miles_is_absent(self, tmp_path):
        with pytest.raises(ConfigError, match="Miles is not installed"):
            self.models(tmp_path)

    def test_it_is_refused_at_the_start_without_sampling_gpus(self, installed, tmp_path):
        with pytest.raises(ConfigError, match=r"cluster\.rollout_gpus"):
            self.models(tmp_path, rollout_gpus=0)

    def test_a_pool_takes_only_the_sampling_gpus_and_drives_miles_from_the_first(
        self, installed, tmp_path
    ):
        made = plan()
        served = ServedModel("tiny", "llama", 256, 259, 1, None, (2,), "float32")
        base = BaseModel(tmp_path, {}, made, served)
        settings = self.models(tmp_path).pool_settings("tiny", base, made)
        assert settings.group.rank_class == MILES_RANK
        assert settings.request.num_bundles == 1
        assert (settings.train_indices, settings.rollout_indices) == ([0], [0])


class TestArguments:
    def test_are_those_of_the_plan(self, installed):
        made = plan(max_seq_len=128)
        args = MilesRank(settings_of(made))._executor.trainer.args
        sizes = (args.num_layers, args.hidden_size, args.num_query_groups, args.kv_channels)
        assert sizes == (4, 64, 2, 16)
        assert (args.tensor_model_parallel_size, args.sequence_parallel) == (2, True)
        assert (args.hf_checkpoint, args.load) == ("/models/tiny", "/models/tiny")
        assert args.actor_num_gpus_per_node == made.layout.world
        assert args.debug_train_only
        assert args.lora_rank == 8

    def test_name_the_experts_where_there_are_some(self, installed):
        made = plan(QWEN_MOE, tp=1, ep=2, dp=2)
        args = MilesRank(settings_of(made))._executor.trainer.args
        assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (4, 2, 32)
        assert args.expert_model_parallel_size == 2

    def test_do_not_name_experts_where_there_are_none(self):
        assert "--moe-router-topk" not in miles_start.miles_arguments(settings_of(plan()))

    def test_every_field_exists_in_our_arguments(self):
        named = {*miles_start.FIELDS, *miles_start.EXPERT_FIELDS, *miles_start.SWITCHES}
        assert named <= set(plan().megatron.__dataclass_fields__)


class TestTraining:
    def test_a_new_adapter_gives_every_token_the_same_probability(self, rank):
        rank.create("m", SPEC)
        output = rank.forward_only("m", batch(7, 9))
        expected = -np.log(miles_stand_in.VOCAB)
        assert [one["logprobs"].shape for one in output.outputs] == [(1,), (2,)]
        np.testing.assert_allclose(output.outputs[1]["logprobs"], expected, rtol=1e-6)
        np.testing.assert_allclose(output.outputs[1]["elementwise_loss"], -expected, rtol=1e-6)
        assert output.metrics["loss:sum"] == pytest.approx(-3 * expected)

    def test_an_optimizer_step_applies_the_accumulated_gradient(self, rank):
        rank.create("m", SPEC)
        before = rank.forward_only("m", batch(7)).metrics["loss:sum"]
        rank.forward_backward_only("m", batch(7))
        rank.forward_backward_only("m", batch(7))
        metrics = rank.apply_optimizer_step("m", ADAM)
        probability = 1 / miles_stand_in.VOCAB
        others = (miles_stand_in.VOCAB - 1) * probability**2
        norm = 2 * np.sqrt((1 - probability) ** 2 + others)
        assert metrics == {"unclipped_grad_l2:mean": pytest.approx(norm)}
        assert rank.forward_only("m", batch(7)).metrics["loss:sum"] < before

    def test_forward_only_accumulates_nothing(self, rank):
        rank.create("m", SPEC)
        rank.forward_only("m", batch(7))
        assert rank.apply_optimizer_step("m", ADAM) == {"unclipped_grad_l2:mean": 0.0}

    def test_all_six_of_adams_parameters_arrive(self, rank, monkeypatch):
        seen = {}
        optim_step = rank._executor.optim_step

        async def watched(params):
            seen.update(params)
            return await optim_step(params)

        rank.create("m", SPEC)
        monkeypatch.setattr(rank._executor, "optim_step", watched)
        wanted = AdamParams(0.5, 0.8, 0.9, 1e-6, 0.25, 2.0)
        rank.apply_optimizer_step("m", wanted)
        assert seen == {
            0: {
                "learning_rate": 0.5,
                "beta1": 0.8,
                "beta2": 0.9,
                "eps": 1e-6,
                "weight_decay": 0.25,
                "grad_clip_norm": 2.0,
            }
        }

    def test_adapters_do_not_see_each_other(self, rank):
        rank.create("a", SPEC)
        rank.create("b", SPEC)
        trained(rank, "a", 7)
        untouched = rank.forward_only("b", batch(7)).metrics["loss:sum"]
        assert untouched == pytest.approx(np.log(miles_stand_in.VOCAB))

    def test_rl_losses_get_the_clients_advantages_and_logprobs(self, rank):
        rank.create("m", SPEC)
        output = rank.forward_backward_only("m", batch(7, loss_fn="importance_sampling"))
        ratio = np.exp(-np.log(miles_stand_in.VOCAB) + 5.0)
        assert output.metrics["loss:sum"] == pytest.approx(-2.0 * ratio)
        assert set(output.outputs[0]) == {"logprobs"}

    def test_a_gradient_that_is_not_finite_is_a_user_error(self, rank):
        rank.create("m", SPEC)
        rank.forward_backward_only("m", batch(7))
        rank._executor.trainer.slots[0]["grad"][:] = np.nan
        with pytest.raises(UserError, match="not finite"):
            rank.apply_optimizer_step("m", ADAM)

    def test_what_miles_refuses_is_a_user_error(self, rank):
        rank.create("m", SPEC)
        with pytest.raises(UserError, match="out of range"):
            rank.forward_backward_only("m", batch(miles_stand_in.VOCAB))

    def test_a_loss_that_miles_lacks_is_refused_by_name(self, rank):
        rank.create("m", SPEC)
        with pytest.raises(UserError, match="gspo"):
            rank.forward_backward_only("m", replace(batch(7), loss_fn="gspo"))

    def test_several_targets_per_position_are_refused(self):
        inputs = {"target_tokens": np.zeros((2, 3), np.int64)}
        with pytest.raises(UserError, match="one target"):
            miles_datum(Datum(np.zeros(2, np.int32), inputs))

    def test_dead_trainers_are_noticed(self, rank):
        rank.create("m", SPEC)
        rank._executor.trainer.dead = True
        with pytest.raises(EngineDied):
            rank.forward_only("m", batch(7))


class TestModels:
    def test_are_as_many_as_there_are_slots(self, rank):
        for index in range(4):
            rank.create(f"m{index}", SPEC)
        with pytest.raises(UserError, match="4 adapters at a time"):
            rank.create("m4", SPEC)

    def test_the_slot_of_a_deleted_one_is_free_again(self, rank):
        for index in range(4):
            rank.create(f"m{index}", SPEC)
        rank.delete("m1")
        rank.create("m4", SPEC)
        assert rank.stats() == {"slots": 4, "free_slots": 0}

    def test_deleting_an_unknown_one_does_nothing(self, rank):
        rank.delete("nobody")

    def test_an_unknown_one_is_lost(self, rank):
        with pytest.raises(ModelStateLost):
            rank.forward_only("nobody", batch(7))

    @pytest.mark.parametrize("spec", [LoraSpec(0, 1), LoraSpec(9, 1)])
    def test_a_rank_that_was_not_planned_is_refused(self, rank, spec):
        with pytest.raises(UserError, match="between 1 and 8"):
            rank.create("m", spec)

    def test_resuming_with_the_optimizer_continues_exactly(self, rank, tmp_path):
        rank.create("m", SPEC)
        trained(rank, "m", 7, steps=3)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        rank.save("m", folder, with_optimizer=True)
        expected = trained(rank, "m", 7, steps=2)
        assert rank.load("n", folder, with_optimizer=True) == SPEC
        assert trained(rank, "n", 7, steps=2) == expected

    def test_a_checkpoint_is_a_folder_of_its_own(self, rank, tmp_path):
        rank.create("m", SPEC)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        rank.save("m", folder, with_optimizer=True)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert found == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "training_state.json",
            "miles",
            "miles/slot.safetensors",
        }
        assert not any(path.is_symlink() for path in folder.rglob("*"))
        state = json.loads((folder / "training_state.json").read_text())
        assert (state["num_steps"], state["has_optimizer"]) == (0, False)

    def test_a_checkpoint_of_another_trainer_is_refused(self, rank, tmp_path):
        rank.create("m", SPEC)
        rank.save("m", tmp_path, with_optimizer=False)
        with pytest.raises(UserError, match="another trainer"):
            rank.load("n", tmp_path, with_optimizer=False)

    def test_merged_weights_are_refused(self, rank, tmp_path):
        rank.create("m", SPEC)
        with pytest.raises(UserError, match="no merged weights"):
            rank.export("m", tmp_path, form="merged")


class TestInATrainGroup:
    async def test_on_ray_a_model_trains_and_is_restored_from_its_checkpoint(
        self, installed, tmp_path
    ):
        from tinkercloud.cluster.gpus.placement import Placer, Request, release
        from tinkercloud.cluster.training.rank_actors import GroupSettings
        from tinkercloud.cluster.training.train_group import RayTrainGroup

        with one_node(cpus=2):
            placement = await Placer().take(Request("miles", 1, device="cpu", timeout_s=60.0))

            async def slots():
                return placement.slots([0])

            settings = GroupSettings(
                name="miles",
                plan=plan(),
                base_model="tiny",
                folder=tmp_path,
                state_dir=tmp_path / "models",
                rank_class=MILES_RANK,
                environment={"PYTHONPATH": f"{installed}:{ROOT}"},
            )
            group = RayTrainGroup(settings, slots)
            await group.onload()
            await group.create("m", SPEC)
            await group.forward_backward_only("m", batch(7))
            await group.apply_optimizer_step("m", ADAM)
            folder = tmp_path / "checkpoint"
            folder.mkdir()
            await group.save("m", folder, with_optimizer=True)
            expected = await group.forward_only("m", batch(7))
            await group.discard()
            await group.onload()
            again = await group.forward_only("m", batch(7))
            assert again.metrics == expected.metrics
            await group.close()
            await release(placement)
            wait_until_settled()
