"""Two drafters for one model's samples: the second drafts where the first has nothing."""

import pytest

from tests.embedded.speculative_engine import Watched, all_same, knowing, mixture, named
from tests.embedded.tiny import Sampler
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.speculation_pair import SpeculationPair
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


class Pairing:
    """What a SamplingEngine takes; most: tokens that each of the two drafts in every round."""

    def __init__(self, first: Drafter, second: Drafter, most: tuple[int, int], *, ready: bool):
        self._drafters, self._ready = (first, second), ready
        self.lengths = Watched(most[0]), Watched(most[1])

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> SpeculationPair:
        first, second = (
            Speculation(GuardedDrafter(drafter, base.config.vocab_size), length)
            for drafter, length in zip(self._drafters, self.lengths, strict=True)
        )
        return SpeculationPair(first, second, lambda: self._ready)


@pytest.mark.parametrize("most", [(0, 4), (4, 4)], ids=["first is silent", "first drafts"])
def test_samples_of_a_pair_equal_those_without_drafts(
    store: ModelStore, base: str, most: tuple[int, int]
) -> None:
    requests = mixture(base, 4, 1.0)
    plain = Sampler(store).run(requests)
    knows = knowing(plain, requests, 3)
    pairing = Pairing(named("random")(260), knows, most, ready=True)
    all_same(Sampler(store, speculate=pairing).run(requests), plain)
    first, second = pairing.lengths
    assert second.num_accepted > 0 if not most[0] else not second.rounds
    assert len(first.skipped_ms) >= len(second.rounds)


def test_rounds_that_pass_are_plain_until_the_second_is_ready(store: ModelStore, base: str) -> None:
    requests = mixture(base, 2, 1.0)
    plain = Sampler(store).run(requests)
    pairing = Pairing(named("random")(260), knowing(plain, requests, 0), (0, 4), ready=False)
    sampler = Sampler(store, speculate=pairing)
    all_same(sampler.run(requests), plain)
    assert pairing.lengths[0].skipped_ms and not pairing.lengths[1].rounds
    assert set(sampler.engine.speculation()[0]["tiny"]["drafters"]) == {"random"}


def test_a_pair_counts_both_drafters_together(store: ModelStore, base: str) -> None:
    requests = mixture(base, 2, 1.0)
    plain = Sampler(store).run(requests)
    pairing = Pairing(named("random")(260), knowing(plain, requests, 0), (0, 4), ready=True)
    sampler = Sampler(store, speculate=pairing)
    all_same(sampler.run(requests), plain)
    counters = sampler.engine.speculation()[0]["tiny"]
    assert set(counters["drafters"]) == {"random", "oracle"}
    assert counters["drafters"]["oracle"]["depths"][0]["accepted"] > 0
    assert counters["second"]["on"] and not counters["second"]["refused"]
