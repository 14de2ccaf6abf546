"""The train group on real Ray and gloo, two simulated nodes, two ranks of a model that can be
checked by hand: order of results, death, hanging, coming back, and what is left behind."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from operator import not_
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.cpu.tiny import PLAIN, SIZES
from tests.cluster.ray_cluster import STORE_BYTES, two_nodes, wait_until_settled
from tests.waiting import LIMIT_S, async_wait_for
from tinkercloud.cluster.gpus.placement import Placement, Placer, Request, release, train_indices
from tinkercloud.cluster.training.rank_actors import GroupSettings
from tinkercloud.cluster.training.train_group import RayTrainGroup
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, TrainBatch
from tinkercloud.errors import EngineDied, ModelStateLost, TrainingRewound, UserError
from tinkercloud.planning.plan import GIB, ClusterShape, Plan, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

SPEC = LoraSpec(rank=4, seed=1)
HANG_S = 10.0  # without progress; a rank that crawls takes longer, half a second at a time
ADAM = AdamParams(learning_rate=0.1)
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[object]:
    with two_nodes(cpus=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until_settled()


def tiny_plan(dp: int) -> Plan:
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config = {**SIZES, **llama, "rope_parameters": PLAIN}
    constraints = PlanConstraints(
        lora_rank=8, tp=1, pp=1, cp=1, dp=dp, max_seq_len=256, dtype="float32"
    )
    return SlimeArgumentBuilder(ClusterShape(dp, dp, 16 * GIB)).build(config, constraints)


@dataclass
class Bench:
    """A group with its placement and a folder for faults."""

    group: RayTrainGroup
    placer: Placer
    placement: Placement
    folder: Path
    settings: GroupSettings

    def fault(self, name: str) -> None:
        (self.folder / "faults" / name).touch()

    def new_group(self, **settings: object) -> RayTrainGroup:
        return RayTrainGroup(replace(self.settings, **settings), self.slots)

    async def slots(self):
        self.placement = await self.placer.restore(self.placement)
        return self.placement.slots(train_indices(self.settings.plan))

    async def checkpoint(self, model_id: str = "m", **options: bool) -> Path:
        folder = self.folder / "checkpoints" / "weights" / f"of-{model_id}" / "files"
        folder.mkdir(parents=True, exist_ok=True)
        await self.group.save(model_id, folder, **({"with_optimizer": True} | options))
        return folder


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    (tmp_path / "faults").mkdir()
    placer = Placer()
    placement = await placer.take(
        Request("group", RANKS, device="cpu", strategy="SPREAD", timeout_s=240.0)
    )
    settings = GroupSettings(
        name="group",
        plan=tiny_plan(RANKS),
        base_model="tiny",
        folder=tmp_path,
        state_dir=tmp_path / "models",
        rank_class="tests.cluster.ray_ranks:TinyRank",
        environment={"TINY_FAULTS": str(tmp_path / "faults")},
        timeout_s=30.0,
        start_timeout_s=240.0,
    )
    made = Bench(None, placer, placement, tmp_path, settings)  # type: ignore[arg-type]
    made.group = made.new_group()
    yield made
    await made.group.close()
    await release(made.placement)
    assert not (tmp_path / "models").exists()


def batch(*targets: int, weight: float = 1.0) -> TrainBatch:
    """One datum for each target; datum i has i + 1 tokens."""
    data = [
        Datum(
            np.full(i + 1, 3, np.int32),
            {
                "target_tokens": np.full(i + 1, target, np.int64),
                "weights": np.full(i + 1, weight, np.float32),
            },
        )
        for i, target in enumerate(targets)
    ]
    return TrainBatch(tuple(data), "cross_entropy")


async def step(group: RayTrainGroup, model_id: str = "m", target: int = 5) -> float:
    """One optimizer step; the loss before it."""
    output = await group.forward_backward_only(model_id, batch(target, target))
    await group.apply_optimizer_step(model_id, ADAM)
    return output.metrics["loss:sum"]


async def started(bench: Bench, *model_ids: str) -> RayTrainGroup:
    await bench.group.onload()
    for model_id in model_ids or ("m",):
        await bench.group.create(model_id, SPEC)
    return bench.group


# ---- results


async def test_results_come_in_request_order_from_all_ranks(bench: Bench):
    group = await started(bench)
    await step(group, target=2)
    output = await group.forward_only("m", batch(2, 7, 2, 7, 2))
    assert [len(one["logprobs"]) for one in output.outputs] == [1, 2, 3, 4, 5]
    likely, unlikely = (float(output.outputs[i]["logprobs"][0]) for i in (0, 1))
    assert likely > unlikely
    assert [float(one["logprobs"][-1]) for one in output.outputs] == [
        *(likely, unlikely, likely, unlikely, likely)
    ]
    assert output.metrics["loss:sum"] == pytest.approx(-(9 * likely + 6 * unlikely), rel=1e-6)


async def test_the_gradient_of_a_batch_is_summed_over_the_ranks(bench: Bench):
    group = await started(bench)
    first = await group.forward_backward_only("m", batch(5, 5))
    metrics = await group.apply_optimizer_step("m", ADAM)
    # Three tokens on two ranks; the gradient of each is softmax minus one-hot.
    uniform = 1 / 32
    norm = 3 * math.sqrt((1 - uniform) ** 2 + 31 * uniform**2)
    assert first.metrics["loss:sum"] == pytest.approx(3 * math.log(32), rel=1e-6)
    assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("num_datums", [200, 400])
async def test_a_batch_is_sent_in_pieces_and_a_large_one_is_read_from_the_object_store(
    bench: Bench, num_datums: int
):
    """Of 1 to so many tokens, 16 bytes each: 321 and 1283 KB. The ranks look how theirs came."""
    group = await started(bench)
    output = await group.forward_backward_only("m", batch(*[5] * num_datums))
    assert [len(one["logprobs"]) for one in output.outputs] == list(range(1, num_datums + 1))
    num_tokens = num_datums * (num_datums + 1) / 2
    assert output.metrics["loss:sum"] == pytest.approx(num_tokens * math.log(32), rel=1e-6)


async def test_a_refusal_of_all_ranks_is_raised_and_changes_nothing(bench: Bench):
    group = await started(bench)
    for rank in range(RANKS):
        bench.fault(f"forward_backward_only-{rank}-refuse")
    with pytest.raises(UserError, match="refused as told"):
        await group.forward_backward_only("m", batch(5))
    assert group.alive
    assert await step(group) > await step(group)


async def test_an_unknown_model_is_lost(bench: Bench):
    group = await started(bench)
    with pytest.raises(ModelStateLost, match="other"):
        await group.forward_only("other", batch(5))


async def test_concurrent_operations_of_two_models_run_in_one_order_on_all_ranks(bench: Bench):
    group = await started(bench, "a", "b")
    both = [[step(group, model_id) for model_id in "ab"] for _ in range(5)]
    losses = [await asyncio.gather(*pair) for pair in both]
    assert [a for a, _ in losses] == [b for _, b in losses]
    assert losses[0][0] > losses[-1][0]


# ---- ranks that fail


async def survive(bench: Bench, fault: str, operation: str = "step") -> list[float]:
    """Two steps, a checkpoint, two steps, the fault, then two steps: the losses of all that ran.

    The failing operation must raise EngineDied, the one after it TrainingRewound.
    """
    group = bench.group
    losses = [await step(group), await step(group)]
    await bench.checkpoint()
    losses += [await step(group), await step(group)]
    bench.fault(fault)
    with pytest.raises(EngineDied, match=r"'m' goes back to .*weights/of-m \(step 2\)"):
        await step(group)
    assert not group.alive
    with pytest.raises(EngineDied):
        await group.forward_only("m", batch(5))
    await group.onload()
    with pytest.raises(TrainingRewound, match=r"checkpoint weights/of-m \(step 2\)"):
        await group.apply_optimizer_step("m", ADAM)
    return [*losses, await step(group), await step(group)]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("forward_backward_only-1-die", marks=pytest.mark.slow),
        "step_midway-0-die",
        pytest.param("apply_optimizer_step-1-raise", marks=pytest.mark.slow),
    ],
)
async def test_after_a_failed_rank_training_continues_from_the_checkpoint_with_equal_numbers(
    bench: Bench, fault: str
):
    await started(bench)
    losses = await survive(bench, fault)
    assert losses[4:] == losses[2:4]  # bit for bit the steps that were lost
    assert bench.group.stats()["rank_restarts"] == 1


async def test_a_rank_that_hangs_is_noticed_and_its_group_is_restored(bench: Bench):
    bench.group = bench.new_group(timeout_s=HANG_S)
    group = await started(bench)
    bench.fault("forward_only-1-hang")
    with pytest.raises(EngineDied, match=r"ranks \[0, 1\] of group made no progress in forward"):
        await group.forward_only("m", batch(5))
    await group.onload()
    await step(group)


async def test_a_slow_rank_that_makes_progress_is_awaited(bench: Bench):
    bench.group = bench.new_group(timeout_s=HANG_S)
    group = await started(bench)
    for rank in range(RANKS):
        bench.fault(f"forward_only-{rank}-crawl")
    output = await group.forward_only("m", batch(5))
    assert output.metrics["loss:sum"] == pytest.approx(math.log(32))


async def test_a_rank_that_dies_between_operations_is_noticed_without_one(bench: Bench):
    group = await started(bench)
    assert group.alive
    import ray

    ray.kill(group._ranks._actors[1])
    await async_wait_for("its end is noticed", lambda: group.alive, not_)
    await group.onload()
    await step(group)  # untouched since its creation: nothing was lost, nothing is told


async def test_each_model_is_restored_from_its_own_restore_point(bench: Bench):
    """Saved and trained on; saved and untouched since; never saved; loaded without optimizer."""
    group = await started(bench, "behind", "saved", "never", "fresh")
    for model_id in ("behind", "saved", "never"):
        await step(group, model_id)
    await bench.checkpoint("behind")
    folder = await bench.checkpoint("saved")
    await group.load("loaded", folder, with_optimizer=False)
    wanted = {m: await group.checksum(m) for m in ("behind", "saved", "fresh", "loaded")}
    await step(group, "behind")
    bench.fault("forward_only-0-die")
    with pytest.raises(EngineDied):
        await group.forward_only("fresh", batch(5))
    await group.onload()
    for model_id in ("saved", "fresh", "loaded"):
        await group.forward_only(model_id, batch(5))
    with pytest.raises(TrainingRewound, match=r"checkpoint weights/of-behind \(step 1\)"):
        await group.forward_only("behind", batch(5))
    with pytest.raises(TrainingRewound, match="its beginning"):
        await group.save("never", bench.folder, with_optimizer=True)
    assert {m: await group.checksum(m) for m in wanted} == wanted
    assert await group.checksum("never") == wanted["fresh"]


async def test_the_loss_of_an_accumulated_gradient_that_no_checkpoint_holds_is_reported(
    bench: Bench,
):
    group = await started(bench)
    await group.forward_backward_only("m", batch(5))
    await bench.checkpoint()  # holds no gradient
    bench.fault("forward_only-0-die")
    with pytest.raises(EngineDied):
        await group.forward_only("m", batch(5))
    await group.onload()
    with pytest.raises(TrainingRewound):
        await group.apply_optimizer_step("m", ADAM)


async def test_a_restore_point_outlives_its_checkpoint(bench: Bench):
    group = await started(bench)
    await step(group)
    folder = await bench.checkpoint()
    weights = await group.checksum("m")
    for path in folder.iterdir():
        path.unlink()
    await group.discard()
    await group.onload()
    assert await group.checksum("m") == weights
    assert len(list((bench.folder / "models" / "m").iterdir())) == 1


async def test_a_model_that_cannot_be_restored_is_lost_and_others_are_not(bench: Bench):
    group = await started(bench, "bad", "good")
    await bench.checkpoint("bad")
    await group.discard()
    for rank in range(RANKS):
        bench.fault(f"load-{rank}-refuse")
    await group.onload()
    with pytest.raises(ModelStateLost):
        await group.forward_only("bad", batch(5))
    await step(group, "good")


async def test_offload_and_onload_keep_the_ranks_and_return_bytes(bench: Bench):
    group = await started(bench)
    assert await group.offload() == RANKS * 1000
    assert await group.onload() == RANKS * 1000
    expected = {"ranks": RANKS, "rank_restarts": 0, "models": 1}
    assert bench.group.stats().items() >= expected.items()


# ---- failing to start


@pytest.mark.parametrize("kind", ["die", "raise"])
async def test_a_rank_that_fails_to_start_fails_the_start_and_leaves_no_rank(
    bench: Bench, kind: str
):
    bench.fault(f"start-1-{kind}")
    with pytest.raises(EngineDied):
        await bench.group.onload()
    assert not bench.group.alive
    await started(bench)


async def test_a_start_that_takes_too_long_is_given_up(bench: Bench):
    group = bench.new_group(start_timeout_s=12.0)
    bench.fault("start-1-hang")
    with pytest.raises(EngineDied, match=r"did not start within 12 s"):
        await group.onload()
    assert not group.alive


async def test_a_cancelled_start_leaves_no_rank(bench: Bench):
    bench.fault("start-1-hang")
    starting = asyncio.create_task(bench.group.onload())
    await asyncio.sleep(4.0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not bench.group.alive


# ---- a node that is lost: last, since it changes the cluster


async def test_a_node_lost_during_a_step_fails_the_operation_and_training_continues(
    bench: Bench, cluster
):
    group = await started(bench)
    losses = [await step(group), await step(group)]
    await bench.checkpoint()
    losses += [await step(group), await step(group)]
    bench.fault("step_midway-0-hang")
    bench.fault("step_midway-1-hang")
    output = await group.forward_backward_only("m", batch(5, 5))
    underway = asyncio.create_task(group.apply_optimizer_step("m", ADAM))
    await asyncio.sleep(1.0)
    lost = next(node for node in cluster.worker_nodes)
    await asyncio.to_thread(cluster.remove_node, lost)
    with pytest.raises(EngineDied, match="died"):
        await asyncio.wait_for(underway, LIMIT_S)
    # Not in a thread: Ray sets a signal handler.
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    await group.onload()
    with pytest.raises(TrainingRewound):
        await step(group)
    again = [await step(group), await step(group)]
    assert again == losses[2:4]
    assert (await group.forward_only("m", batch(5, 5))).metrics == output.metrics
