"""Recipes of the official cookbooks, unmodified, against a real server on real weights.

A recipe that exits with status 0 may have learned nothing: each test also reads what the recipe
measured, and asks the server for what it saved.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.e2e.hub import MODEL, build_hub, chat, wikitext_lines
from tests.e2e.page_reading import write_start
from tests.e2e.recipes import NEWEST, RECIPES, Run, cookbooks, run_recipe
from tests.serving import Server, start_server
from tinker_gmi.run_metrics import RunMetrics
from tinkercloud.cli import main
from tinkercloud.embedded.native.compiler import library
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

LIMIT_S = 500.0
FEW_TOKENS = tinker.SamplingParams(max_tokens=4, temperature=0.0)

# Of the sampler's and the trainer's log-probabilities of the same tokens, at most.
KL_V1, KL_V2 = (0.0, 0.0) if library() is not None else (5e-2, 1e-2)


@dataclass(frozen=True)
class Kitchen:
    """cookbook: its version. root: with a hub for each."""

    server: Server
    root: Path
    client: tinker.ServiceClient
    rest: tinker.RestClient
    cookbook: str = "0.5.8"

    @property
    def hub(self) -> Path:
        return self.root / self.cookbook

    def cook(self, name: str) -> Run:
        """The run of a recipe: every step measured, nobody complained."""
        python = cookbooks()[self.cookbook]
        run = run_recipe(RECIPES[name], self.hub, self.server.sdk_environment, LIMIT_S, python)
        assert [row["step"] for row in run.metrics] == list(range(run.recipe.num_steps))
        assert run.complaints == []
        assert " ERROR " not in self.server.output()
        assert "Traceback" not in self.server.output()
        return run

    @cached_property
    def renderer(self) -> renderers.Renderer:
        return renderers.get_renderer("qwen3_instruct", get_tokenizer(str(self.hub / MODEL)))

    def score(self, sampler: tinker.SamplingClient, question: str, answer: str) -> float:
        """log p(answer | question), the end of the turn included."""
        messages = chat(question, answer)["messages"]
        tokens, weights = self.renderer.build_supervised_example(messages)
        logprobs = sampler.compute_logprobs(tokens).result()
        pairs = zip(logprobs[1:], weights[1:].tolist(), strict=True)
        return sum(logprob for logprob, weight in pairs if weight)


@pytest.fixture(scope="module")
def kitchen(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    root = tmp_path_factory.mktemp("cookbook")
    tokenizer = ensure_tokenizer_folder(smollm2_gguf, root / "tokenizers")
    assert tokenizer is not None
    for version in cookbooks():
        build_hub(root / version, tokenizer)
    with start_server("--model", f"{MODEL}={smollm2_gguf}", data_dir=root / "data") as server:
        named = {"base_url": server.base_url, "api_key": server.api_key}
        with tinker.ServiceClient(**named) as client:
            yield Kitchen(server, root, client, tinker.RestClient(**named))


def newest_kitchen(kitchen: Kitchen) -> Kitchen:
    python = Path(cookbooks()[NEWEST])
    if not python.exists():
        reason = f"there is no {python}: `make test-all` installs cookbook {NEWEST} there"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return replace(kitchen, cookbook=NEWEST)


@pytest.fixture(params=["0.5.8", pytest.param(NEWEST, marks=pytest.mark.slow)])
def each(request: pytest.FixtureRequest, kitchen: Kitchen) -> Kitchen:
    """With each cookbook."""
    return kitchen if request.param == kitchen.cookbook else newest_kitchen(kitchen)


@pytest.fixture
def newest(kitchen: Kitchen) -> Kitchen:
    return newest_kitchen(kitchen)


def finite(run: Run, *names: str) -> list[list[float]]:
    """One list for each name: its value at each step, all of them finite numbers."""
    columns = [[float(row[name]) for row in run.metrics] for name in names]
    assert all(math.isfinite(value) for column in columns for value in column)
    return columns


def assert_sampler_and_trainer_agree(run: Run) -> None:
    first, second, entropies = finite(
        run, "optim/kl_sample_train_v1", "optim/kl_sample_train_v2", "optim/entropy"
    )
    assert max(map(abs, first)) <= KL_V1
    assert max(second) <= KL_V2
    assert min(entropies) > 0


def assert_saved(kitchen: Kitchen, run: Run, *names: str, rank: int = 8) -> tinker.SamplingClient:
    """All that the recipe says it saved is there, and the last of it samples."""
    assert [record["name"] for record in run.checkpoints] == list(names)
    rest = kitchen.rest
    for record in run.checkpoints:
        paths = record["state_path"], record["sampler_path"]
        for info in [rest.get_weights_info_by_tinker_path(path).result() for path in paths]:
            assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, rank)
        training_run = rest.get_training_run_by_tinker_path(paths[0]).result()
        listed = rest.list_checkpoints(training_run.training_run_id).result().checkpoints
        assert set(paths) <= {checkpoint.tinker_path for checkpoint in listed}
    sampler = kitchen.client.create_sampling_client(
        model_path=run.checkpoints[-1]["sampler_path"]
    ).result()
    prompt = tinker.ModelInput.from_ints([1, 520, 9531, 198])
    assert len(sampler.sample(prompt, 1, FEW_TOKENS).result().sequences[0].tokens) > 0
    return sampler


def assert_learned(kitchen: Kitchen, run: Run, question: str, answer: str, *names: str) -> None:
    """The saved weights hold a trained answer for more probable than the base model does."""
    trained = assert_saved(kitchen, run, *names)
    base = kitchen.client.create_sampling_client(base_model=MODEL).result()
    before, after = (kitchen.score(sampler, question, answer) for sampler in (base, trained))
    assert after > before + 0.02


def test_a_warning_counts_as_a_complaint_whatever_its_colour() -> None:
    told = "tinker.lib:12 [\x1b[92mINFO\x1b[0m] fine\ntinker.lib:13 [\x1b[93mWARNING\x1b[0m] slow\n"
    expected = "__main__:9 [WARNING] Batch 0: all advantages zero, skipping training step\n"
    run = Run(RECIPES["rl_loop"], told + expected, 0.0, [], [], {})
    assert run.complaints == ["tinker.lib:13 [WARNING] slow"]


def assert_reported(kitchen: Kitchen, run: Run, name: str) -> None:
    """`tinkercloud report` takes the file that the recipe has written, to the last step."""
    run_id = run.checkpoints[-1]["state_path"].removeprefix("tinker://").split("/")[0]
    path = str(run.recipe.log_dir(kitchen.hub) / "metrics.jsonl")
    server = kitchen.server
    where = ("--base-url", server.base_url, "--api-key", server.api_key)
    assert main(["report", run_id, path, *where]) == 0
    with RunMetrics(server.base_url, server.api_key) as metrics:
        shown = {point["step"]: point["metrics"] for point in metrics.reported(run_id)}
    assert [shown[row["step"]][name] for row in run.metrics] == [row[name] for row in run.metrics]


def test_arithmetic_rl_runs_and_its_sampler_agrees_with_its_trainer(each: Kitchen) -> None:
    run = each.cook("arithmetic_rl")
    assert_default_loss(each, run)
    assert_sampler_and_trainer_agree(run)
    rewards, episodes, tokens = finite(
        run, "env/all/reward/total", "env/all/total_episodes", "env/all/total_ac_tokens"
    )
    assert all(-0.1 <= reward <= 1.0 for reward in rewards)
    assert episodes == [8.0, 8.0, 8.0]
    assert_reported(each, run, "env/all/reward/total")
    assert all(8 <= count <= 40 for count in tokens)
    assert_saved(each, run, "final")


TEMPERATURES = (0.5, 0.7, 1.0, 1.2, 1.8)


def test_sampled_logprobs_keep_the_temperature_law(kitchen: Kitchen) -> None:
    """log p_T(i) - log p_T(j) = (log p_1(i) - log p_1(j)) / T for all sampled tokens i, j."""
    sampler = kitchen.client.create_sampling_client(base_model=MODEL).result()
    prompt = kitchen.renderer.tokenizer.encode("The best way to travel is by")
    drawn = {t: first_tokens(sampler, prompt, t, num_samples=24) for t in TEMPERATURES}
    plain = plain_logprobs(sampler, prompt, sorted(set().union(*drawn.values())))
    for temperature, logprobs in drawn.items():
        assert len(logprobs) >= 2
        # The law for all pairs at once: the same offset (the normaliser) for every token.
        offsets = [logprob - plain[token] / temperature for token, logprob in logprobs.items()]
        assert max(offsets) - min(offsets) < 1e-3
        if temperature == 1.0:
            assert max(map(abs, offsets)) < 1e-3


def test_logprobs_within_a_sample_are_those_of_each_next_token(kitchen: Kitchen) -> None:
    sampler = kitchen.client.create_sampling_client(base_model=MODEL).result()
    prompt = kitchen.renderer.tokenizer.encode("The best way to travel is by")
    params = tinker.SamplingParams(max_tokens=6, temperature=0.5, seed=42)
    whole = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    assert whole.logprobs is not None
    differences = []
    for length, (token, logprob) in enumerate(zip(whole.tokens, whole.logprobs, strict=True)):
        after = first_tokens(sampler, [*prompt, *whole.tokens[:length]], 0.5, num_samples=16)
        if token in after:
            differences.append(abs(after[token] - logprob))
    assert len(differences) >= 2
    assert max(differences) < 1e-3


def first_tokens(
    sampler: tinker.SamplingClient, prompt: list[int], temperature: float, num_samples: int
) -> dict[int, float]:
    """The tokens drawn after the prompt, each with the log-probability that was reported."""
    params = tinker.SamplingParams(max_tokens=1, temperature=temperature, seed=7)
    drawn = sampler.sample(tinker.ModelInput.from_ints(prompt), num_samples, params).result()
    return {s.tokens[0]: s.logprobs[0] for s in drawn.sequences if s.logprobs}


def plain_logprobs(
    sampler: tinker.SamplingClient, prompt: list[int], tokens: list[int]
) -> dict[int, float]:
    """log p(token | prompt) under the model's own softmax, each scored as part of a prompt."""
    scored = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints([*prompt, token])) for token in tokens
    ]
    logprobs = (future.result()[-1] for future in scored)
    return {token: lp for token, lp in zip(tokens, logprobs, strict=True) if lp is not None}


@pytest.mark.slow
def test_supervised_loop_learns_its_data(each: Kitchen) -> None:
    run = each.cook("sl_loop")
    losses, norms, sizes = finite(run, "train_mean_nll", "unclipped_grad_l2:mean", "num_sequences")
    assert all(0 < loss < 5 for loss in losses)
    assert min(norms) > 0
    assert sizes == [4.0, 4.0, 4.0]
    trained = ("What is the capital of Norway?", "The capital of Norway is Oslo.")
    assert_learned(each, run, *trained, "final")


@pytest.mark.slow
def test_rl_loop_finds_rewards_and_trains_on_them(each: Kitchen) -> None:
    run = each.cook("rl_loop")
    assert_default_loss(each, run)
    (rewards,) = finite(run, "reward/total")
    assert all(0 <= reward <= 1 for reward in rewards)
    assert sum(rewards) > 0
    norms = [row.get("unclipped_grad_l2:mean", 0.0) for row in run.metrics]
    assert max(norms) > 0
    assert all(map(math.isfinite, norms))
    assert_saved(each, run, "final")


@pytest.mark.slow
def test_chat_sft_learns_and_can_be_continued_from_its_checkpoint(each: Kitchen) -> None:
    run = each.cook("chat_sft")
    losses, norms = finite(run, "train_mean_nll", "unclipped_grad_l2:mean")
    assert losses[2] < losses[0]
    assert min(norms) > 0
    trained = ("What is the capital of Peru?", "The capital of Peru is Lima.")
    assert_learned(each, run, *trained, "000002", "final")
    state_path = run.checkpoints[-1]["state_path"]
    resumed = each.client.create_training_client_from_state_with_optimizer(state_path).result()
    assert resumed.optim_step(tinker.AdamParams(learning_rate=0.0)).result() is not None
    assert resumed.get_info().model_data.model_name == MODEL


@pytest.mark.slow
def test_prompt_distillation_learns_the_labels(each: Kitchen) -> None:
    run = each.cook("prompt_distillation")
    losses, norms = finite(run, "train_mean_nll", "unclipped_grad_l2:mean")
    assert all(0 < loss < 20 for loss in losses)
    assert min(norms) > 0
    assert_learned(each, run, "The cat is on the roof.", "English", "final")


@pytest.mark.slow
def test_dpo_starts_where_policy_and_reference_are_one(each: Kitchen) -> None:
    run = each.cook("dpo")
    losses, margins, _ = finite(run, "dpo_loss", "margin", "test/nll")
    # The reference is scored by the sampler, the policy by the trainer: at the first step all that
    # can part them is what makes the two disagree.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert margins[0] == pytest.approx(0, abs=1e-3)
    assert losses[1] < losses[0]
    assert_saved(each, run, "final", rank=32)


@pytest.mark.slow
def test_on_policy_distillation_from_oneself_starts_at_no_distance(each: Kitchen) -> None:
    run = each.cook("on_policy_distillation")
    assert_sampler_and_trainer_agree(run)
    distances, norms = finite(run, "teacher_kl", "unclipped_grad_l2:mean")
    assert distances[0] == pytest.approx(0, abs=1e-4)
    assert norms[0] < 0.1
    # From an exact agreement there is nothing to learn; from one up to rounding, noise is learnt.
    assert (distances[1] != distances[0]) == (norms[0] > 0)
    assert_saved(each, run, "final")


@pytest.mark.slow
def test_guess_the_number_plays_several_turns(each: Kitchen) -> None:
    run = each.cook("guess_number")
    assert_sampler_and_trainer_agree(run)
    episodes, turns, rewards = finite(
        run, "env/all/total_episodes", "env/all/total_turns", "env/all/reward/total"
    )
    assert episodes == [2.0]
    assert 2 < turns[0] <= 20
    assert -10 <= rewards[0] <= 1
    assert_saved(each, run, "final", rank=32)


@pytest.mark.slow
def test_preference_rl_trains_on_comparisons(each: Kitchen) -> None:
    run = each.cook("shorter")
    assert_sampler_and_trainer_agree(run)
    first, second, norms = finite(run, "kl_pre_post_v1", "kl_pre_post_v2", "unclipped_grad_l2:mean")
    assert abs(first[0]) < 0.5
    assert 0 < second[0] < 0.5
    assert norms[0] > 0
    assert_saved(each, run, "final", rank=32)


# ---- stable_reinforce, the default of the newest


def assert_default_loss(kitchen: Kitchen, run: Run) -> None:
    if kitchen.cookbook != NEWEST:
        return
    asynchronous = run.config.get("async_config") or {}
    assert asynchronous.get("loss_fn", run.config["loss_fn"]) == "stable_reinforce"


@pytest.mark.slow
def test_async_rl_trains_on_samples_of_older_weights(each: Kitchen) -> None:
    run = each.cook("async_rl")
    assert_default_loss(each, run)
    rewards, norms = finite(run, "env/all/reward/total", "unclipped_grad_l2:mean")
    assert max(norms) > 0
    assert all(-0.1 <= reward <= 1.0 for reward in rewards)
    assert_saved(each, run, "000000", "final", rank=8)


@pytest.mark.slow
def test_the_rl_numerics_check_finds_no_difference(newest: Kitchen) -> None:
    log_dir = RECIPES["rl_numerics_check"].log_dir(newest.hub)
    write_start(log_dir, newest.client, newest.renderer, "".join(wikitext_lines()))
    run = newest.cook("rl_numerics_check")
    assert_sampler_and_trainer_agree(run)
    episodes, turns = finite(run, "env/all/total_episodes", "env/all/total_turns")
    assert episodes == [2.0, 2.0]
    assert min(turns) > 2  # pages were read
    assert_saved(newest, run, "start", "final")


@pytest.mark.slow
def test_rl_with_a_rubric_trains_on_what_a_grader_says(newest: Kitchen) -> None:
    run = newest.cook("rubric")
    assert_default_loss(newest, run)
    assert_sampler_and_trainer_agree(run)
    finite(run, "env/all/reward/total", "unclipped_grad_l2:mean")  # one group may earn alike: 0
    assert_saved(newest, run, "final")
