"""The whole backend on its real engines: Ray, Megatron-core over gloo on two ranks, SGLang behind
a recorder, colocated on CPU bundles, with a tiny Llama."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.cluster.cpu.engines import (
    sglang_command,
    write_served_model,
)
from tests.cluster.cpu.recorder import calls, recorded
from tests.cluster.ray_cluster import groups_alive, one_node, wait_until_settled
from tests.embedded.tiny import ask, random_prompt, reference, supervised
from tests.waiting import async_wait_for
from tinkercloud.cluster.backend import ClusterBackend
from tinkercloud.config import ClusterConfig, Config, ModelSource
from tinkercloud.core.types import (
    AdamParams,
    FromBase,
    FromCheckpoint,
    FromModel,
    LoraSpec,
    SampleOutput,
    ServedModel,
    TrainBatch,
)
from tinkercloud.errors import EngineDied, ModelStateLost, TrainingRewound, UserError, VersionLost
from tinkercloud.services.checkpoints.external_files import write_export
from tinkercloud.weights.peft_import import import_adapter, write_imported

SPEC = LoraSpec(rank=8, seed=3)
FULL = LoraSpec(rank=0, seed=0)
DATA = TrainBatch(tuple(supervised(12 + i, i) for i in range(3)), "cross_entropy")
ENGINES = 2  # one on each bundle
PROMPT = random_prompt(9, 1)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with one_node(cpus=4):
        yield


@dataclass
class Cluster:
    backend: ClusterBackend
    config: Config
    record: Path
    served: ServedModel

    async def step(self, model_id: str, learning_rate: float = 5e-3) -> float:
        """The loss before the step."""
        output = await self.backend.forward_backward(model_id, DATA)
        await self.backend.optim_step(model_id, AdamParams(learning_rate=learning_rate))
        return output.metrics["loss:sum"]

    async def loss(self, model_id: str) -> float:
        batch = replace(DATA, forward_only=True)
        return (await self.backend.forward_backward(model_id, batch)).metrics["loss:sum"]

    async def scores(self, version: str) -> np.ndarray:
        """The version's log-probabilities of the first datum's targets."""
        datum = DATA.data[0]
        tokens = [*datum.tokens.tolist(), int(datum.inputs["target_tokens"][-1])]
        request = ask(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=True)
        output = await self.backend.sample(version, request)
        assert output.prompt_logprobs is not None
        return output.prompt_logprobs[1:]

    async def trained_scores(self, model_id: str) -> np.ndarray:
        batch = replace(DATA, forward_only=True)
        return (await self.backend.forward_backward(model_id, batch)).outputs[0]["logprobs"]

    async def saved(self, model_id: str, folder: Path, **options: bool) -> Path:
        await asyncio.to_thread(folder.mkdir, parents=True)
        await self.backend.save_model(model_id, folder, **({"with_optimizer": True} | options))
        return folder

    def pool_of(self, model_id: str):
        return self.backend._models[model_id].pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    root = tmp_path_factory.mktemp("cluster")
    (root / "model").mkdir()
    model = write_served_model(root / "model")
    record = root / "calls.jsonl"
    own = ClusterConfig(
        gpus=2,
        gpu_memory_bytes=16 * 1024**3,
        tp=2,
        rollout_tp=1,
        lora_rank=16,
        max_seq_len=256,
        device="cpu",
        sglang_command=shlex.join(recorded(record, sglang_command())),
        sglang_args=shlex.join(("--max-total-tokens", "2048")),
        placement_timeout_s=300.0,
        start_timeout_s=240.0,
        operation_timeout_s=120.0,
        sample_timeout_s=120.0,
    )
    config = Config(
        data_dir=root / "data", models=(ModelSource("tiny", model),), backend="cluster", cluster=own
    )
    backend = ClusterBackend(config)
    (served,) = await backend.start()
    assert (served.vocab_size, served.max_context_length, served.dtype) == (260, 256, "float32")
    assert served.eos_token_ids == (256,)
    yield Cluster(backend, config, record, served)
    await backend.stop()
    await asyncio.to_thread(wait_until_settled)


async def test_a_new_adapter_samples_as_the_base_and_as_it_trains(cluster: Cluster):
    backend = cluster.backend
    await backend.create_model("m", "tiny", SPEC)
    version = await backend.publish(FromModel("m"))
    base = await backend.publish(FromBase("tiny"))
    trained = await cluster.trained_scores("m")
    np.testing.assert_allclose(await cluster.scores(version), trained, atol=1e-4)
    np.testing.assert_allclose(await cluster.scores(base), trained, atol=1e-4)


async def test_training_lowers_the_loss_and_the_sampler_follows_when_published(cluster: Cluster):
    backend = cluster.backend
    losses = [await cluster.step("m") for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    version = await backend.publish(FromModel("m"))
    np.testing.assert_allclose(
        await cluster.scores(version), await cluster.trained_scores("m"), atol=1e-3
    )


async def test_an_older_version_answers_with_older_weights_to_the_bit(cluster: Cluster):
    backend = cluster.backend
    older = await backend.publish(FromModel("m"))
    before = await cluster.scores(older)
    await cluster.step("m")
    newer = await backend.publish(FromModel("m"))
    after = await cluster.scores(newer)
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(await cluster.scores(older), before)


async def test_samples_of_a_seed_do_not_depend_on_what_else_runs(cluster: Cluster):
    backend = cluster.backend
    version = await backend.publish(FromModel("m"))
    base = await backend.publish(FromBase("tiny"))
    request = ask(PROMPT, n=2, max_tokens=6, seed=11)
    alone = await backend.sample(version, request)
    *_, among = await asyncio.gather(
        *(backend.sample(base, ask(PROMPT, max_tokens=4, seed=i)) for i in range(3)),
        cluster.loss("m"),  # training takes its turn between them
        backend.sample(version, request),
    )
    assert _tokens(alone) == _tokens(among)
    assert len({tuple(tokens) for tokens in _tokens(alone)}) == 2


def _tokens(output: SampleOutput) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in output.sequences]


async def test_engines_released_and_resumed_memory_in_the_required_order(cluster: Cluster):
    """Seen by the recorder: all parts are released; weights come first, the cache last."""
    asked = [
        (call["path"].partition("_")[0], tuple(call["body"]["tags"]))
        for call in calls(cluster.record, "/release_memory_occupation", "/resume_memory_occupation")
    ]
    moves = [(move, len(list(engines))) for move, engines in groupby(asked)]
    release = ("/release", ("kv_cache", "cuda_graph", "weights"))
    resumes = [("/resume", (tag,)) for tag in ("weights", "cuda_graph", "kv_cache")]
    assert len(moves) >= 8
    for index, move in enumerate(moves):
        assert move == ([release, *resumes][index % 4], ENGINES)


async def test_nothing_is_generated_while_the_trainer_has_the_gpus(cluster: Cluster):
    released = False
    for call in calls(cluster.record):
        if call["path"] == "/release_memory_occupation":
            released = True
        elif call["path"] == "/resume_memory_occupation" and call["body"]["tags"] == ["kv_cache"]:
            released = False
        assert not (released and call["path"] == "/generate")


async def test_a_checkpoint_resumes_and_can_be_sampled(cluster: Cluster, tmp_path: Path):
    backend = cluster.backend
    folder = await cluster.saved("m", tmp_path / "weights" / "name" / "files")
    version = await backend.publish(FromCheckpoint("tiny", folder))
    spec = await backend.load_model("resumed", "tiny", folder, with_optimizer=True)
    assert spec == SPEC
    np.testing.assert_allclose(
        await cluster.scores(version), await cluster.trained_scores("resumed"), atol=1e-3
    )
    assert await cluster.step("resumed") == await cluster.step("m")
    assert await cluster.loss("resumed") == pytest.approx(await cluster.loss("m"), rel=1e-6)
    await backend.delete_model("resumed")
    with pytest.raises(ModelStateLost):
        await backend.optim_step("resumed", AdamParams())


async def test_an_export_loads_in_peft(cluster: Cluster, tmp_path: Path):
    expected = await cluster.trained_scores("m")
    folder = await exported(cluster, "m", tmp_path)
    base = await asyncio.to_thread(reference, cluster.config.models[0].path)
    adapted = await asyncio.to_thread(PeftModel.from_pretrained, base, folder)
    np.testing.assert_allclose(scores_of(adapted.eval()), expected, atol=1e-4)


async def test_an_adapter_of_peft_trains_and_samples_as_in_peft(cluster: Cluster, tmp_path: Path):
    path = cluster.config.models[0].path
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    torch.manual_seed(2)
    adapted = get_peft_model(await asyncio.to_thread(reference, path), config).eval()
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "peft")
    folder = tmp_path / "weights" / "imported" / "files"
    await asyncio.to_thread(folder.mkdir, parents=True)
    write_imported(import_adapter(tmp_path / "peft", path), "tiny", folder)
    backend = cluster.backend
    assert (await backend.load_model("peft", "tiny", folder, with_optimizer=False)).alpha == 5
    expected = scores_of(adapted)
    np.testing.assert_allclose(await cluster.trained_scores("peft"), expected, atol=1e-4)
    version = await backend.publish(FromCheckpoint("tiny", folder))
    np.testing.assert_allclose(await cluster.scores(version), expected, atol=1e-4)
    await backend.delete_model("peft")


async def exported(cluster: Cluster, model_id: str, root: Path) -> Path:
    """A model's weights as `save_weights_external` leaves them."""
    source, folder = root / "source", root / "export"
    await cluster.saved(model_id, source, with_optimizer=False)
    await asyncio.to_thread(folder.mkdir)
    write_export(source, folder, cluster.served)
    return folder


def scores_of(model: Any) -> np.ndarray:
    """The log-probabilities of the first datum's targets, by transformers."""
    datum = DATA.data[0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None].long()).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0].numpy()


async def test_more_versions_than_engines_hold_all_answer(cluster: Cluster):
    backend = cluster.backend
    cluster.pool_of("m").engines._adapters._slots = 2
    versions = []
    for _ in range(4):
        versions.append(await backend.publish(FromModel("m")))
        await cluster.step("m", learning_rate=1e-2)
    first = [await cluster.scores(version) for version in versions]
    again = [await cluster.scores(version) for version in versions]
    np.testing.assert_array_equal(first, again)
    assert backend.stats()["tiny: adapters_loaded"] == 2
    assert len({float(scores.sum()) for scores in first}) == 4


async def test_a_released_version_is_gone_from_the_engines_and_from_disk(cluster: Cluster):
    backend = cluster.backend
    released = await backend.publish(FromModel("m"))
    folder = cluster.config.data_dir / "cluster" / "versions" / released
    await cluster.scores(released)
    assert folder.is_dir()
    await backend.release(released)
    with pytest.raises(VersionLost):
        await cluster.scores(released)
    await cluster.scores(await backend.publish(FromModel("m")))
    assert not folder.exists()
    unloaded = [call["body"]["lora_name"] for call in calls(cluster.record, "/unload_lora_adapter")]
    assert released in unloaded


async def test_input_that_only_the_backend_can_refuse_is_a_user_error(cluster: Cluster, tmp_path):
    with pytest.raises(UserError, match="rank 17"):
        await cluster.backend.create_model("big", "tiny", LoraSpec(rank=17, seed=0))
    with pytest.raises(UserError, match="not a checkpoint"):
        await cluster.backend.load_model("none", "tiny", tmp_path, with_optimizer=False)
    await cluster.loss("m")


async def test_a_rank_that_dies_fails_one_operation_and_reports_the_rewind(
    cluster: Cluster, tmp_path
):
    """Training goes on from the checkpoint; what was published is not touched."""
    import ray

    backend = cluster.backend
    published = await backend.publish(FromModel("m"))
    scores = await cluster.scores(published)
    await cluster.saved("m", tmp_path / "weights" / "kept" / "files")
    saved = await cluster.loss("m")
    await cluster.step("m")
    underway = asyncio.create_task(cluster.loss("m"))
    await asyncio.sleep(0.02)
    ray.kill(cluster.pool_of("m").group._ranks._actors[1])
    with pytest.raises(EngineDied):
        await underway
        await cluster.loss("m")  # where the rank was faster than its end
    with pytest.raises(TrainingRewound, match="weights/kept"):
        await cluster.loss("m")
    assert await cluster.loss("m") == pytest.approx(saved, rel=1e-6)
    np.testing.assert_array_equal(await cluster.scores(published), scores)


@pytest.mark.slow
async def test_full_parameter_models_have_gpus_of_their_own_until_they_are_deleted(
    cluster: Cluster, tmp_path: Path
):
    """Fills the cluster: a second one waits, says so, and gets its turn."""
    backend = cluster.backend
    await backend.create_model("adapter", "tiny", SPEC)
    await backend.create_model("full", "tiny", FULL)
    assert sorted(groups_alive()) == ["full", "tiny"]
    fresh = await cluster.loss("full")
    losses = [await cluster.step("full", 1e-3) for _ in range(2)]
    assert losses[0] == pytest.approx(fresh, rel=1e-6)
    assert losses[1] < losses[0]

    second = asyncio.create_task(backend.create_model("second", "tiny", FULL))
    await async_wait_for(
        "the second one says why it waits",
        lambda: backend.queue_state("second"),
        lambda reason: reason == "waiting until 2 CPU bundles are free",
    )
    await asyncio.sleep(1.5)
    assert not second.done()

    version = await backend.publish(FromModel("full"))
    trained = await cluster.trained_scores("full")
    np.testing.assert_allclose(await cluster.scores(version), trained, atol=1e-3)
    folder = await cluster.saved("full", tmp_path / "weights" / "full" / "files")
    export = await exported(cluster, "full", tmp_path)
    np.testing.assert_allclose(scores_of(reference(export)), trained, atol=1e-4)
    await backend.delete_model("full")
    await asyncio.wait_for(second, 200)
    assert backend.queue_state("second") is None
    assert await cluster.loss("second") == pytest.approx(fresh, rel=1e-6)
    await backend.delete_model("second")
    await backend.delete_model("adapter")

    # What it published outlives it, beside the base's adapters and the base itself.
    base = await backend.publish(FromBase("tiny"))
    again = await backend.publish(FromCheckpoint("tiny", folder))
    untrained = await cluster.scores(base)
    np.testing.assert_allclose(await cluster.scores(version), trained, atol=1e-3)
    np.testing.assert_allclose(await cluster.scores(again), trained, atol=1e-3)
    np.testing.assert_array_equal(await cluster.scores(base), untrained)
    assert np.abs(untrained - trained).max() > 1e-3
