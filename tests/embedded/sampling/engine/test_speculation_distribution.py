"""T2: samples with drafts against samples without, as one compares them who sees only what came.

Seeds differ, so that no token has to be another's: first tokens and pairs of tokens are counted and
compared by chi-square, log-probabilities and lengths of whole samples by Kolmogorov and Smirnov's
test, with Holm's correction over all drafters. Rules that are known to be wrong must be seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from tests.embedded.decode_scene import random_base, tiny_config, version, with_weights
from tests.embedded.speculative_engine import Drafting, untaught_head
from tests.embedded.tiny import ask
from tinkercloud.core.types import SampleOutput
from tinkercloud.decoding.sampler import RowParams
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling import postprocessor
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.sampling.sequences import Sequence as Sample
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.verify import Verdict, match

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")

V, N, LONGEST = 100, 20_000, 8
N_FEW = 8_000  # enough to see the rules below that are wrong
ENDED = V  # stands behind a sample's end
STOPS = (3, 14, 15, 92, 65)
PROMPT = (27, 18, 28)
DRAFTED = {"suffix": 3, "model": 3, "head": 1}  # tokens for every sample in every round
LEVEL = 0.01  # the chance that a comparison of equals says otherwise
RARE = 10  # what is seen less often, in both together, is counted as one
DISTRIBUTIONS = {"whole": {}, "cut": {"temperature": 0.8, "top_k": 40, "top_p": 0.95}}
SEEDS = {"plain": 1, "suffix": 2, "model": 3, "head": 4}

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """tokens (N, LONGEST), ENDED behind the end; logprobs (N,) of whole samples; lengths (N,)."""

    tokens: Codes
    logprobs: NDArray[np.float64]
    lengths: Codes

    @classmethod
    def of(cls, output: SampleOutput) -> "Samples":
        tokens = np.full((len(output.sequences), LONGEST), ENDED)
        for row, sequence in zip(tokens, output.sequences, strict=True):
            row[: len(sequence.tokens)] = sequence.tokens
        logprobs = [float(sequence.logprobs.sum()) for sequence in output.sequences]
        return cls(tokens, np.array(logprobs), (tokens != ENDED).sum(1))

    def pair(self, at: int) -> Codes:
        """The tokens `at` and after it, as one number."""
        return self.tokens[:, at] * (V + 1) + self.tokens[:, at + 1]


# ---- the comparison


def chi_square(one: Codes, other: Codes) -> float:
    """The p-value of their counts to be of one distribution."""
    kinds, codes = np.unique(np.concatenate([one, other]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(kinds)) for part in np.split(codes, [len(one)])]
    table = np.array(counts)
    rare = table.sum(0) < RARE
    table = np.column_stack([table[:, ~rare], *([table[:, rare].sum(1)] if rare.any() else [])])
    return float(stats.chi2_contingency(table).pvalue)


def compared(one: Samples, other: Samples) -> dict[str, float]:
    """p-values. The first token is drawn with the prompt; the second comes with the first draft,
    the fifth somewhere inside one."""
    return {
        "first tokens": chi_square(one.tokens[:, 0], other.tokens[:, 0]),
        "first and second": chi_square(one.pair(0), other.pair(0)),
        "fourth and fifth": chi_square(one.pair(3), other.pair(3)),
        "log-probabilities": float(stats.ks_2samp(one.logprobs, other.logprobs).pvalue),
        "lengths": float(stats.ks_2samp(one.lengths, other.lengths).pvalue),
    }


def rejected(p_values: Mapping[object, float]) -> list[object]:
    """Which of the equalities cannot be, by Holm's procedure at LEVEL."""
    order = sorted(p_values, key=lambda name: p_values[name])
    for i, name in enumerate(order):
        if p_values[name] > LEVEL / (len(order) - i):
            return order[:i]
    return order


# ---- samples


@pytest.fixture(scope="module")
def target() -> BaseModel:
    """Two layers; the most likely token has about a half."""
    base = random_base(tiny_config("Llama", vocab_size=V, num_hidden_layers=2))
    return with_weights(base, {**base.weights, "lm_head": 2.0 * base.weights["lm_head"]})


@pytest.fixture(scope="module")
def cut(target: BaseModel) -> Samples:
    return drawn(target, "cut", SEEDS["plain"])


def drawn(
    base: BaseModel, distribution: str, seed: int, drafting: Drafting | None = None, num: int = N
) -> Samples:
    request = ask(
        list(PROMPT), n=num, max_tokens=LONGEST, seed=seed, stop_token_ids=STOPS, use_eos=False,
        **DISTRIBUTIONS[distribution],
    )  # fmt: skip
    outputs: list[SampleOutput | BaseException] = []
    engine = SamplingEngine(max_batch=128, kv_cache_bytes=2**26, num_threads=1, speculate=drafting)
    engine.submit(version(base, None, 0), request, outputs.append)
    while engine.busy:
        engine.step()
    (output,) = outputs
    assert isinstance(output, SampleOutput)
    return Samples.of(output)


def neighbour(base: BaseModel) -> BaseModel:
    """The same network with other weights, that often says the same."""
    generator = torch.Generator().manual_seed(8)
    moved = {
        name: weight + 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in base.weights.items()
    }
    return with_weights(base, moved)


def model(base: BaseModel) -> ModelDrafter:
    other = neighbour(base)
    pool = BlockPool(other.config, other.dtype, other.device, 400)
    return ModelDrafter(version(other, None, 0), NativeRunner(1), pool)


DRAFTERS: dict[str, Callable[[BaseModel], Drafter]] = {
    "suffix": lambda base: SuffixDrafter(),
    "model": model,
    "head": lambda base: HeadDrafter(TorchHead(*untaught_head(base))),
}


def drafting_by(name: str, base: BaseModel) -> Drafting:
    return Drafting(lambda _: DRAFTERS[name](base), DRAFTED[name])


def require_same_distribution(
    base: BaseModel, distribution: str, expected: Samples, count: int
) -> None:
    p_values: dict[object, float] = {}
    for name in DRAFTERS:
        drafting = drafting_by(name, base)
        samples = drawn(base, distribution, SEEDS[name], drafting, count)
        assert drafting.policy.num_accepted > 0.02 * count, name
        assert not np.array_equal(samples.tokens, expected.tokens[:count])
        p_values |= {(name, what): p for what, p in compared(samples, expected).items()}
    assert rejected(p_values) == [], p_values


@pytest.mark.slow
def test_samples_with_drafts_follow_the_distribution_of_those_without(
    target: BaseModel, cut: Samples
) -> None:
    require_same_distribution(target, "cut", cut, N_FEW)


@pytest.mark.slow
def test_samples_of_the_whole_vocabulary_follow_the_distribution_of_those_without_drafts(
    target: BaseModel,
) -> None:
    require_same_distribution(target, "whole", drawn(target, "whole", SEEDS["plain"]), N)


# ---- rules that are known to be wrong


def lets_drafts_stand_now_and_then(patch: pytest.MonkeyPatch) -> None:
    """One in ten of the drafted tokens that the target would not have drawn."""
    coins = np.random.default_rng(5)

    def lenient(drafted: Sequence[int], tokens: Sequence[int]) -> Verdict:
        verdict = match(drafted, tokens)
        at = verdict.num_accepted
        if at < len(drafted) and coins.random() < 0.1:
            return Verdict((*verdict.tokens[:-1], drafted[at]))
        return verdict

    patch.setattr(postprocessor, "match", lenient)


def with_rows(patch: pytest.MonkeyPatch, change: Callable[[RowParams, int], RowParams]) -> None:
    own = Sample.row_params
    patch.setattr(Sample, "row_params", lambda self, i=0: change(own(self, i), i))


def draws_a_round_with_one_noise(patch: pytest.MonkeyPatch) -> None:
    with_rows(patch, lambda row, i: replace(row, position=row.position - i))


def verifies_by_the_law_before_warping(patch: pytest.MonkeyPatch) -> None:
    def unwarped(row: RowParams) -> RowParams:
        return replace(row, params=replace(row.params, temperature=1.0, top_k=-1, top_p=1.0))

    with_rows(patch, lambda row, i: unwarped(row) if i else row)


WRONG = (
    lets_drafts_stand_now_and_then,
    draws_a_round_with_one_noise,
    verifies_by_the_law_before_warping,
)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_rule_of_acceptance_is_detected(
    wrong: Callable[[pytest.MonkeyPatch], None],
    target: BaseModel,
    cut: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong(monkeypatch)
    samples = drawn(target, "cut", SEEDS["model"], drafting_by("model", target), N_FEW)
    p_values = compared(samples, cut)
    assert rejected(p_values), p_values
    assert min(p_values.values()) < 1e-6, p_values
    assert p_values["first tokens"] > LEVEL, "it is drawn before anything is drafted"


def test_a_shift_of_two_percent_on_few_tokens_is_detected_and_no_shift_is_not() -> None:
    coins, trials = np.random.default_rng(3), 200
    probs = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
    moved = probs + np.array([0.02, -0.02, 0.0, 0.0, 0.0])

    def seen(other: NDArray[np.float64]) -> int:
        return sum(
            chi_square(*(coins.choice(len(probs), N, p=p) for p in (probs, other))) < LEVEL
            for _ in range(trials)
        )

    assert seen(moved) > 0.95 * trials
    assert seen(probs) <= 4 * LEVEL * trials


def test_holms_procedure_stops_at_the_first_hypothesis_that_may_hold() -> None:
    assert rejected({"a": 0.5, "b": 0.002, "c": 0.0049, "d": 0.011}) == ["b"]
    assert rejected({"a": 0.009, "b": 0.004}) == ["b", "a"]
    assert rejected({"a": 0.02, "b": 0.3}) == []
