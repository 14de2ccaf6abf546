"""Samples with drafts under the policy that decides how many, whatever comes and when."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.embedded.speculative_engine import Drafting, Watched, knowing, named
from tests.embedded.tiny import Sampler, ask, random_prompt, same
from tinkercloud.core.types import SampleOutput
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.controller import DraftLengthController
from tinkercloud.speculative.draft_length.costs import CostTable, MeasuredCosts
from tinkercloud.speculative.draft_length.planning import Estimates
from tinkercloud.speculative.draft_length.rounds import Round
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


def decided(drafter: str, machine: Sequence[float]) -> Callable[..., Speculation]:
    """Speculation under its real policy, where 1, 8 and 128 rows are said to take so many ms."""

    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        vocab_size = base.config.vocab_size
        rows = (1, 2, 4, 8, 16, 32, 64, 128)
        ms = tuple(np.interp(rows, (1, 8, 128), machine).tolist())
        policy = DraftLengthController(Estimates(CostTable(MeasuredCosts(rows, ms, ms))))
        return Speculation(GuardedDrafter(named(drafter)(vocab_size), vocab_size), policy)

    return make


@pytest.mark.parametrize("machine", [(10.0, 10.5, 12.0), (1.0, 8.0, 128.0)], ids=["flat", "steep"])
def test_requests_that_arrive_at_any_time_are_answered_as_alone(
    store: ModelStore, base: str, machine: tuple[float, float, float]
) -> None:
    """T8: arrivals at random between rounds; every one is answered, whatever is drafted."""
    generator = np.random.default_rng(0)
    requests = [
        ask(
            random_prompt(int(generator.integers(3, 40)), i % 5), n=1 + i % 3,
            max_tokens=int(generator.integers(2, 50)), seed=i, use_eos=False,
            temperature=(0.0, 0.3, 1.0)[i % 3],
        )
        for i in range(40)
    ]  # fmt: skip
    sampler = Sampler(store, max_batch=12, num_threads=2, speculate=decided("suffix", machine))
    outputs: dict[int, SampleOutput] = {}
    waiting = list(enumerate(requests))
    while waiting or sampler.engine.busy:
        for _ in range(min(len(waiting), int(generator.poisson(0.4)))):
            i, request = waiting.pop(0)
            sampler.engine.submit(
                store.version(base), request, lambda o, i=i: outputs.__setitem__(i, o)
            )
        if sampler.engine.busy:
            sampler.engine.step()
    assert len(outputs) == len(requests)
    for i, request in enumerate(requests):
        same(outputs[i], Sampler(store).one(base, request))
    snapshot = sampler.engine.speculation()[0]["tiny"]
    assert snapshot["tokens"] > snapshot["forwards"] > 0


def test_a_request_may_turn_drafts_off(store: ModelStore, base: str) -> None:
    request = ask(random_prompt(10, 1), n=4, max_tokens=30, seed=1, use_eos=False)
    sampler = Sampler(store, speculate=decided("random", (10.0, 10.5, 12.0)))
    without = replace(request, speculate=False)
    same(sampler.one(base, without), sampler.one(base, request))
    snapshot = sampler.engine.speculation()[0]["tiny"]
    assert snapshot["off"]["not wanted by the sessions"] >= 3  # asked now and then
    assert snapshot["drafters"]["random"]["depths"][0]["verified"] > 0


def test_rounds_without_a_decision_are_told_with_their_time(store: ModelStore, base: str) -> None:
    request = ask(random_prompt(10, 1), max_tokens=30, seed=1, use_eos=False)
    drafting = Drafting(named("random"), 0)
    Sampler(store, speculate=drafting).one(base, request)
    rounds, skipped_ms = drafting.policy.rounds, drafting.policy.skipped_ms
    assert len(rounds) + len(skipped_ms) == 29  # the first token is the prompt's
    assert len(skipped_ms) > len(rounds) > 0
    assert min(skipped_ms) > 0


class EverySecond(Watched):
    """Finds every second draft worth its rows; remembers which of the rounds were decided."""

    def __init__(self) -> None:
        super().__init__(2)
        self.log = ""

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        verified = len(self.rounds) % 2 == 1
        return [len(draft) if verified else 0 for draft in confidences]

    def skipped(self, ms: float, num_sequences: int, *, usable: bool) -> None:
        self.log += "."

    def observe(self, last_round: Round) -> None:
        super().observe(last_round)
        self.log += "V" if last_round.num_verified else "-"


@pytest.mark.parametrize(("err_every", "log"), [(1, "-.V-...V-.......V-...."), (0, "-.V-.V-.V-.V")])
def test_decisions_become_rare_until_a_drafted_token_is_accepted(
    store: ModelStore, base: str, err_every: int, log: str
) -> None:
    requests = {"0": (base, ask(random_prompt(9, 1), max_tokens=40, seed=1, use_eos=False))}
    known = {"0": Sampler(store).one(base, requests["0"][1])}
    policy = EverySecond()

    def make(model: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        oracle = knowing(known, requests, err_every)
        return Speculation(GuardedDrafter(oracle, model.config.vocab_size), policy)

    same(Sampler(store, speculate=make).one(base, requests["0"][1]), known["0"])
    assert policy.log.startswith(log)


def test_nothing_is_drafted_for_many_samples_where_each_row_costs_its_full_price(
    store: ModelStore, base: str
) -> None:
    """Times are this machine's own, so only what the table says at the start is looked at."""
    request = ask(random_prompt(10, 1), n=48, max_tokens=20, seed=1, use_eos=False)
    sampler = Sampler(store, speculate=decided("random", (1.0, 8.0, 128.0)))
    same(sampler.one(base, request), Sampler(store).one(base, request))
    snapshot = sampler.engine.speculation()[0]["tiny"]
    assert (
        snapshot["rounds"]["speculative"] == 0
        or snapshot["rows"]["wasted"] < 0.2 * snapshot["rows"]["used"]
    )
