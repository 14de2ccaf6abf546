"""The aims of the speed benchmarks, some of which depend on the kernels' instruction set."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import rl_step, sampling, training
from benchmarks.lib.limits import Limits
from benchmarks.lib.report import Target
from benchmarks.peers.rl_common import Scale as StepScale
from benchmarks.peers.rl_common import StepLog
from benchmarks.peers.sampling_bench import Case, Measured
from benchmarks.peers.sampling_bench import Scale as SamplingScale

LIMITS = Limits(read_gb_s=1.0, gflop_s={"float32": 10.0, "bfloat16": 40.0})
SCALE = SamplingScale(LIMITS, parameters=10**6, unembedding=0, pair_flop=0.0)


def judged(goals: list[Target]) -> dict[str, tuple[float, str]]:
    """Value and aim, by what follows the load in a target's name."""
    return {goal.name.rpartition(": ")[2]: (float(goal.value), goal.target) for goal in goals}


# ---- sampling


def measured(who: str, case: Case, tokens_s: float, **times: list[float]) -> Measured:
    return Measured(who, "bfloat16", case, 1.0, int(tokens_s), 0, **times)


def sampling_goals(case: Case, in_use: str, ours: float, **peers: float) -> dict[str, tuple]:
    rows = [measured(sampling.OURS, case, ours)]
    rows += [measured(name, case, speed) for name, speed in peers.items()]
    return judged(sampling.targets(rows, SCALE, in_use))


@pytest.mark.parametrize(
    ("case", "aim"), [(Case(64, 1), ">= 1"), (Case(64, 8), ">= 1.3"), (Case(512, 2, 16), ">= 1.3")]
)
def test_sampling_is_held_against_the_best_peer_whoever_that_is(case: Case, aim: str):
    goals = sampling_goals(case, "avx512_bf16", 300, slow=100, fast=200)
    assert goals["times the best peer"] == (1.5, aim)
    assert "times the best peer" not in sampling_goals(case, "avx512_bf16", 300)


def test_at_128_the_share_of_the_limit_is_an_aim_and_with_amx_three_times_the_old_speed():
    assert sampling_goals(Case(64, 128), "avx512_bf16", 600) == {
        "share of the matrix limit": (0.44, ">= 0.5")  # of 8,792 tokens, 2 MFLOP each
    }
    assert sampling_goals(Case(64, 128), "amx", 618) == {
        "times the 309 tokens/s by AVX-512": (2.0, ">= 3")
    }
    assert sampling_goals(Case(512, 128), "amx", 618) == {}


def test_the_first_token_of_a_long_prompt_is_held_against_the_peer_that_is_soonest():
    case = Case(512, 1)
    rows = [
        measured(sampling.OURS, case, 10, first_s=[0.2, 0.3, 0.1]),
        measured("slow", case, 20, first_s=[0.8]),
        measured("soon", case, 5, first_s=[0.1]),
    ]
    goals = judged(sampling.targets(rows, SCALE, "avx512_bf16"))
    assert goals["first token, best peer's time by ours"] == (0.5, ">= 1")
    assert goals["times the best peer"] == (0.5, ">= 1")


# ---- training

TRAINING_SCALE = training.Scale(
    {("8 x 8", "float32"): 1.0, ("8 x 8", "bfloat16"): 4.0},
    {True: 10**7, False: 10**7},
    {"8 x 8": 0.0},
)


def training_goals(dtype: str, in_use: str, tokens: Mapping[str, int]) -> dict[str, tuple]:
    """Of contenders that take as many bytes as they train tokens a second."""
    rows = [
        training.Row("8 x 8", name, dtype, count, 1.0, count, 0, [], Path())
        for name, count in tokens.items()
    ]
    return judged(training.targets(rows, TRAINING_SCALE, in_use))


@pytest.mark.parametrize(("in_use", "aim"), [("avx512_bf16", ">= 1.4"), ("amx", ">= 2.5")])
def test_bfloat16_training_is_held_against_the_fastest_of_peft(in_use: str, aim: str):
    speeds = {training.OURS: 90, training.PLAIN: 60, training.BEST: 50}
    assert training_goals("bfloat16", in_use, speeds) == {
        "tokens/s over PEFT's best": (1.5, aim),
        "peak memory over PEFT, best": (1.8, "<= 0.45"),
    }


def test_the_limit_of_a_batch_is_the_best_of_those_beside_our_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates, order = iter([400.0, 500.0]), list[str]()

    def products(dtypes: Sequence[str], seconds: float) -> dict[str, float]:
        order.append("limit")
        return dict.fromkeys(dtypes, next(rates))

    def run(bench: training.Bench, name: str, *_: object) -> None:
        order.append(name)

    monkeypatch.setattr(training, "products", products)
    monkeypatch.setattr(training.Bench, "_run", run)
    names = [training.OURS, training.BEST]
    bench = training.Bench(Path(), Path(), {}, names, 1, (), 60.0, 3, 0.0)
    assert bench.measure("2 x 8", [8, 8], "float32") == []
    assert bench.limits == {("2 x 8", "float32"): 500.0}
    assert order == ["limit", training.OURS, "limit", training.BEST]


def test_float32_training_is_held_against_the_machines_limit():
    goals = training_goals("float32", "amx", {training.OURS: 75, training.PLAIN: 60})
    assert goals == {"share of the matrix limit": (0.75, ">= 0.7")}


# ---- a step of RL


def test_a_step_of_rl_is_held_against_skyrl_more_in_bfloat16():
    seconds = {rl_step.OURS: 10.0, rl_step.OURS_NARROW: 5.0, rl_step.SKYRL: 40.0}
    logs = {name: StepLog(steps=[{"sample": s}, {"sample": s}]) for name, s in seconds.items()}
    rows = [rl_step.Row(name, log, StepScale()) for name, log in logs.items()]
    goals = [(goal.value, goal.target) for goal in rl_step.targets(rows)]
    assert goals == [(4.0, ">= 3"), (8.0, ">= 5")]
