"""Whatever workers elsewhere do, samples are those without drafts."""

import sys
from collections.abc import Callable

import pytest

from tests.embedded.speculative_engine import Drafting, all_same, knowing, mixture
from tests.embedded.tiny import VOCAB, Sampler
from tests.speculative.remote.workers import TARGET, FaultyLink, LocalLink, worker_of
from tinkercloud.embedded.drafting.worker_drafters import WorkerDrafters
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.speculative.remote.worker import DraftWorker, WorkerLimits

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")

WAIT_S = 0.002
MOST = 5


def schedules(store: ModelStore, base: str, seeds: range) -> tuple[int, int]:
    """Samples of each seed's schedule of faults are those without drafts; returns how many faults
    there were, and how many drafted tokens were accepted all the same."""
    requests = mixture(base, 4, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    num_faults = num_accepted = 0
    for seed in seeds:
        links: list[FaultyLink] = []

        def make(_: int, seed: int = seed, links: list[FaultyLink] = links) -> RemoteDrafter:
            drafters: list[Callable[[], Drafter]] = [
                lambda: knowing(plain, requests, 3), SuffixDrafter,
            ]  # fmt: skip
            limits = WorkerLimits(num_samples=1 + seed % 8)
            for i in range(1 + seed % 2):
                worker = worker_of(drafters[(seed + i) % 2], limits)
                links.append(FaultyLink(worker, 2 * seed + i, f"worker {i}"))
            return RemoteDrafter(links, WAIT_S, TARGET.vocab_size)

        drafting = Drafting(make, MOST)
        all_same(Sampler(store, speculate=drafting).run(requests), plain)
        num_faults += sum(link.faults for link in links)
        num_accepted += drafting.policy.num_accepted
    return num_faults, num_accepted


def test_delay_loss_death_and_lies_change_no_token_and_no_logprob(
    store: ModelStore, base: str
) -> None:
    num_faults, num_accepted = schedules(store, base, range(30))
    assert num_faults > 200
    assert num_accepted > 400


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_schedules_change_nothing(store: ModelStore, base: str, hundred: int) -> None:
    first = 1000 + 100 * hundred
    seeds = range(first, first + 100)
    num_faults, num_accepted = schedules(store, base, seeds)
    told = f"{len(seeds)} schedules: {num_faults} faults, {num_accepted} drafted tokens accepted"
    sys.stdout.write(told)  # which pytest -rP shows
    assert num_faults > 600
    assert num_accepted > 1200


def test_a_worker_that_knows_the_sample_is_always_right(store: ModelStore, base: str) -> None:
    requests = mixture(base, 4, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    drafting = Drafting(
        lambda _: RemoteDrafter(
            [LocalLink(worker_of(lambda: knowing(plain, requests, 0)))],
            wait_s=10.0,
            vocab_size=TARGET.vocab_size,
        ),
        MOST,
    )
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    num_verified = sum(each.num_verified for each in drafting.policy.rounds)
    assert drafting.policy.num_accepted > 0.9 * num_verified > 0
    assert TARGET.vocab_size == VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_worker_with_the_target_itself_is_right_and_prepared(
    store: ModelStore, base: str, temperature: float
) -> None:
    """Its drafts have the target's noise; a draft that is taken whole was prepared for."""
    requests = mixture(base, 3, temperature, use_eos=False)
    plain = Sampler(store).run(requests)
    remotes: list[RemoteDrafter] = []

    def make(_: int) -> RemoteDrafter:
        drafters = WorkerDrafters(store.base("tiny"), NativeRunner(1), pool_bytes=2**24)
        remotes.append(RemoteDrafter([LocalLink(DraftWorker(drafters))], 10.0, TARGET.vocab_size))
        return remotes[-1]

    drafting = Drafting(make, MOST)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    num_verified = sum(each.num_verified for each in drafting.policy.rounds)
    assert drafting.policy.num_accepted == num_verified > 0
    assert remotes[0].counts["prepared"] > remotes[0].counts["asked"] / 2
