"""T8: requests that come at random, with the controller and without drafts, on the same trace."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.speculative.draft_length.simulated import DRAFTERS, MACHINES, Run, started
from tinkercloud.speculative.draft_length.rounds import Load

MAX_BATCH = 32
MEAN_TOKENS = 60
NUM_REQUESTS = 150


@dataclass
class Request:
    """left: tokens that are still to come; None of its times is known before it ends."""

    arrives_ms: float
    num_tokens: int
    left: int = field(init=False)
    ended_ms: float | None = None

    def __post_init__(self) -> None:
        self.left = self.num_tokens

    @property
    def latency_ms(self) -> float:
        assert self.ended_ms is not None
        return self.ended_ms - self.arrives_ms


def trace(busy: float, ms: Callable[[int], float], seed: int) -> list[Request]:
    """Poisson arrivals of so many times the tokens that the machine writes without drafts."""
    coins = np.random.default_rng(seed)
    per_request_ms = MEAN_TOKENS * ms(MAX_BATCH) / MAX_BATCH
    arrivals = np.cumsum(coins.exponential(per_request_ms / busy, NUM_REQUESTS))
    lengths = coins.geometric(1 / MEAN_TOKENS, NUM_REQUESTS)
    return [Request(float(at), int(n)) for at, n in zip(arrivals, lengths, strict=True)]


def serve(requests: list[Request], ms: Callable[[int], float], run: Run | None) -> None:
    """First come, first served, up to MAX_BATCH in a round; run None: without drafts."""
    clock_ms, waiting, running = 0.0, list(requests), list[Request]()
    while waiting or running:
        if not running:
            clock_ms = max(clock_ms, waiting[0].arrives_ms)
        while waiting and waiting[0].arrives_ms <= clock_ms and len(running) < MAX_BATCH:
            running.append(waiting.pop(0))
        if run is None:
            accepted, took_ms = [0] * len(running), ms(len(running))
        else:
            before_ms = run.outcome.quiet_ms
            accepted = run.round([Load(100, group=id(request)) for request in running])
            took_ms = run.outcome.quiet_ms - before_ms
        clock_ms += took_ms
        for request, num in zip(running, accepted, strict=True):
            request.left -= 1 + num
            if request.left <= 0:
                request.ended_ms = clock_ms
        running = [request for request in running if request.left > 0]


def goodput(requests: list[Request]) -> float:
    """Tokens of what was answered in each millisecond until the last answer; who was not answered
    counts with nothing."""
    ended = [one for one in requests if one.ended_ms is not None]
    last_ms = max(one.ended_ms or 0.0 for one in ended)
    return sum(one.num_tokens for one in ended) / last_ms


def tail_ms(requests: list[Request]) -> float:
    return float(np.percentile([one.latency_ms for one in requests], 99))


@pytest.mark.parametrize(
    "busy",
    [pytest.param(0.5, marks=pytest.mark.slow), 0.9, pytest.param(2.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_goodput_is_never_below_plain_and_no_answer_comes_late(machine, drafter, busy):
    """Answers in the mean of some days: in a queue that is nearly full, one round more or less
    decides over the last of a day."""
    ms, tails = MACHINES[machine], list[tuple[float, float]]()
    for seed in (3, 4, 5):
        plain, drafted = trace(busy, ms, seed), trace(busy, ms, seed)
        serve(plain, ms, None)
        serve(drafted, ms, started(ms, DRAFTERS[drafter], seed + 1))
        assert all(one.ended_ms is not None for one in (*plain, *drafted))
        assert goodput(drafted) >= 0.95 * goodput(plain)
        tails.append((tail_ms(drafted), tail_ms(plain)))
    drafted_ms, plain_ms = map(sum, zip(*tails, strict=True))
    assert drafted_ms <= 1.1 * plain_ms


def test_where_drafts_are_accepted_and_rows_are_cheap_the_queue_is_shorter():
    ms = MACHINES["memory bound"]
    plain, drafted = trace(1.5, ms, seed=5), trace(1.5, ms, seed=5)
    serve(plain, ms, None)
    serve(drafted, ms, started(ms, DRAFTERS["history"], seed=6))
    assert goodput(drafted) > 1.3 * goodput(plain)
    assert tail_ms(drafted) < 0.5 * tail_ms(plain)


def test_a_controller_that_always_drafts_would_be_seen():
    """The look-out itself: on a machine where rows cost their price, eight drafted tokens each."""
    ms = MACHINES["compute bound"]
    plain, drafted = trace(2.0, ms, seed=3), trace(2.0, ms, seed=3)
    serve(plain, ms, None)
    run = started(ms, DRAFTERS["never right"], seed=4)
    run.controller.limits = lambda loads: [8] * len(loads)  # type: ignore[method-assign]
    run.controller.choose = lambda confidences: [8] * len(confidences)  # type: ignore[method-assign]
    serve(drafted, ms, run)
    assert goodput(drafted) < 0.5 * goodput(plain)
    assert tail_ms(drafted) > 1.1 * tail_ms(plain)
