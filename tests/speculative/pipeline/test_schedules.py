"""Whatever drafters do and whenever the target goes, texts over workers are the target's own."""

import random
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from tests.speculative.pipeline.conftest import Workers, wait_until_no_session
from tests.speculative.pipeline.scripted import MODEL, VOCAB, Knowing, ScriptedEngine, plain
from tests.speculative.remote.workers import FaultyLink
from tinkercloud.addresses import Address
from tinkercloud.core.types import SamplingParams
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.pipeline.loop import Writer, run_speculative_loop
from tinkercloud.speculative.pipeline.options import PipelineOptions
from tinkercloud.speculative.pipeline.result import PipelineResult, Round
from tinkercloud.speculative.pipeline.target_session import TargetSession
from tinkercloud.speculative.remote.connection import ClientSecurity
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.speculative.remote.target_connection import TargetConnection
from tinkercloud.speculative.remote.target_worker import TargetLimits
from tinkercloud.speculative.remote.worker import DraftWorker

NUM_TOKENS, WAIT_S = 40, 0.002


@dataclass
class Found:
    faults: int = 0
    cuts: int = 0
    evictions: int = 0
    accepted: int = 0


def run_schedule(port: int, seed: int, found: Found) -> None:
    """A text over one drafter or two behind faulty links, and a target whose connection is cut and
    whose session is forgotten now and then."""
    generator = random.Random(seed)
    cut, forget = (generator.choice([0.0, 0.0, 0.1, 0.3]) for _ in range(2))
    options = PipelineOptions(
        NUM_TOKENS, drafted=5, branches=1 + seed % 3, undrafted=3, seed=seed, draft_wait_s=WAIT_S
    )
    drafters = [Knowing(generator.choice([0, 1, 3])) for _ in range(1 + seed % 2)]
    links = [
        FaultyLink(DraftWorker(lambda _, each=each: each), 2 * seed + i, f"worker {i}")
        for i, each in enumerate(drafters)
    ]
    target = TargetConnection(Address("127.0.0.1", port), ClientSecurity(), 10.0)
    target.connect(5.0)
    params = SamplingParams(None, seed)
    prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 6))]
    session, drafter = TargetSession(target, params, 5.0), RemoteDrafter(links, WAIT_S, VOCAB)
    session.tokens.extend(prompt)
    stream = Stream(1, 1, "", 0, session.tokens, len(prompt), params, sample_index=0)
    drafter.begin(stream)
    writer = Writer(session, drafter, stream)

    def on_round(_: Round) -> None:
        if generator.random() < cut:
            found.cuts += 1
            assert target._stream is not None
            target._stream.call.cancel()
        elif generator.random() < forget:
            found.evictions += 1
            other = TargetSession(target, params, 5.0)
            other.tokens.append(1)
            other.verify([], 1, threading.Event())
            other.end()

    try:
        result = run_speculative_loop(
            writer, PipelineResult(prompt, params), options, threading.Event(), on_round
        )
    finally:
        writer.end()
        drafter.close()
        target.close()
    assert (result.tokens, result.logprobs) == plain(prompt, seed, NUM_TOKENS), seed
    found.faults += sum(link.faults for link in links)
    found.accepted += sum(each.accepted for each in result.rounds)


class SlowAtTimes(ScriptedEngine):
    def step(self) -> None:
        if len(self.passes) % 7 == 0:
            time.sleep(2 * WAIT_S)
        super().step()


def run_schedules(workers: Workers, seeds: range) -> Found:
    engine, found = SlowAtTimes(), Found()
    target = workers.target(engine, TargetLimits(num_sessions=1))
    for seed in seeds:
        run_schedule(target.port, seed, found)
    wait_until_no_session(target)
    assert not engine.jobs
    assert MODEL.vocab_size == VOCAB
    return found


def test_no_schedule_of_faults_changes_a_token_or_a_logprob(workers: Workers) -> None:
    found = run_schedules(workers, range(40))
    assert found.faults > 100
    assert found.accepted > 200
    assert found.cuts > 20
    assert found.evictions > 20


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_schedules_change_nothing(workers: Workers, hundred: int) -> None:
    first = 1000 + 100 * hundred
    found = run_schedules(workers, range(first, first + 100))
    sys.stdout.write(f"100 schedules: {found}")  # which pytest -rP shows
    assert found.faults > 300
    assert found.accepted > 600
    assert found.cuts > 60
    assert found.evictions > 60
