"""Outputs over workers are the target's own, whatever drafters do, and nothing is left of them."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from operator import not_
from pathlib import Path
from statistics import median

import pytest

from tests.serving import ROOT
from tests.speculative.pipeline.conftest import (
    Workers,
    at,
    wait_for_drafters,
    wait_until_no_session,
)
from tests.speculative.pipeline.scripted import MODEL, Knowing, ScriptedEngine, plain
from tests.waiting import async_wait_for, wait_for
from tinkercloud.errors import ConfigError, InvalidRequest, UserError
from tinkercloud.speculative.pipeline import (
    Orchestrator,
    PipelineOptions,
    PipelineResult,
    TargetGone,
)
from tinkercloud.speculative.remote.connection import ClientSecurity, ServerSecurity
from tinkercloud.speculative.remote.target_worker import TargetLimits

PROMPT, SEED = [5, 6, 7], 3
OPTIONS = PipelineOptions(max_tokens=60, seed=SEED, draft_wait_s=5.0, round_timeout_s=10.0)
EXPECTED = plain(PROMPT, SEED, 60)


def is_expected(result: PipelineResult) -> bool:
    return (result.tokens, result.logprobs) == EXPECTED


@pytest.mark.parametrize("wrong", [0, 1, 5])
@pytest.mark.parametrize("branches", [1, 4])
def test_an_output_is_the_target_s_whatever_is_drafted(
    workers: Workers, wrong: int, branches: int
) -> None:
    """Drafters that are always right, never, and sometimes."""
    engine, drafter = ScriptedEngine(), Knowing(wrong)
    target, draft = workers.target(engine), workers.draft(drafter)
    options = replace(OPTIONS, branches=branches)
    with Orchestrator(at(target), at(draft), options) as pipeline:
        wait_for_drafters(pipeline)
        result = pipeline.run_with_result_sync(PROMPT)
    assert is_expected(result)
    assert result.finish_reason in ("stop", "length")
    if wrong == 0:
        assert result.acceptance == 1.0
        assert len(result.rounds) <= 1 + len(result.tokens) / 9
    if wrong == 1:
        assert result.acceptance == 0.0
    wait_until_no_session(target)
    wait_for("no connection is left", target.worker.stats, lambda s: s["connections"] == 0)
    wait_for("no draft is left", lambda: drafter.live, not_)
    assert not engine.jobs


def test_branches_are_verified_in_one_pass(workers: Workers) -> None:
    """Two drafters: one knows the first tokens, the other all; the tree has both."""
    engine = ScriptedEngine()
    target = workers.target(engine)
    drafts = [workers.draft(Knowing(wrong)) for wrong in (3, 0)]
    options = replace(OPTIONS, branches=4, drafted=4)
    with Orchestrator(at(target), ",".join(map(at, drafts)), options) as pipeline:
        wait_for_drafters(pipeline)
        result = pipeline.run_with_result_sync(PROMPT)
    assert is_expected(result)
    assert max(engine.passes) > 1
    assert any(each.nodes > each.depth for each in result.rounds)
    assert len(engine.passes) == len(result.rounds)


def test_without_drafters_the_target_samples_alone(workers: Workers) -> None:
    target = workers.target(ScriptedEngine())
    with Orchestrator(at(target), options=OPTIONS) as pipeline:
        result = pipeline.run_with_result_sync(PROMPT)
    assert is_expected(result)
    assert result.acceptance == result.hit_rate == 0.0
    assert "no drafts" in result.summary


def test_a_seed_is_drawn_where_none_is_set_and_told(workers: Workers) -> None:
    target = workers.target(ScriptedEngine())
    with Orchestrator(at(target), options=replace(OPTIONS, seed=None)) as pipeline:
        results = [pipeline.run_with_result_sync(PROMPT) for _ in range(2)]
    for result in results:
        assert (result.tokens, result.logprobs) == plain(PROMPT, result.params.seed, 60)
    assert results[0].params.seed != results[1].params.seed


def test_a_drafter_that_dies_changes_no_token(workers: Workers) -> None:
    engine = ScriptedEngine()
    target, draft = workers.target(engine), workers.draft(Knowing())
    with Orchestrator(at(target), at(draft), OPTIONS) as pipeline:
        first = pipeline.run_with_result_sync(PROMPT)
        draft.stop()
        second = pipeline.run_with_result_sync(PROMPT)
    assert is_expected(first)
    assert is_expected(second)


def test_a_target_that_comes_back_goes_on_where_it_stopped(workers: Workers) -> None:
    """Its sessions are gone: they are opened again with their tokens, amid an output."""
    first = workers.target(ScriptedEngine())
    said: list[str] = []

    def on_text(piece: str) -> None:
        said.append(piece)
        if len(said) == 2:
            first.stop()
            workers.target(ScriptedEngine(), port=first.port)

    options = replace(OPTIONS, undrafted=4)
    with Orchestrator(at(first), options=options) as pipeline:
        result = pipeline.run_with_result_sync(PROMPT, on_text)
    assert len(said) > 2
    assert is_expected(result)


def test_a_session_that_was_evicted_is_opened_again(workers: Workers) -> None:
    """Of two, which the target has at the same time."""
    engine = ScriptedEngine(is_held=True)
    target = workers.target(engine, TargetLimits(num_sessions=1))
    with Orchestrator(at(target), options=replace(OPTIONS, undrafted=4)) as pipeline:
        both = [
            threading.Thread(target=pipeline.run_with_result_sync, args=(PROMPT,)) for _ in range(2)
        ]
        for thread in both:
            thread.start()
        wait_for("one was evicted", lambda: target.worker.counts["evicted"])
        engine.is_held = False
        for thread in both:
            thread.join()
    assert [is_expected(result) for result in pipeline.results] == [True, True]


def test_a_target_that_is_away_is_named(workers: Workers) -> None:
    target = workers.target(ScriptedEngine())
    target.stop()
    with pytest.raises(TargetGone, match=f"{at(target)}: unavailable"):
        Orchestrator(at(target), options=OPTIONS).connect_sync()


def test_a_target_that_does_not_answer_is_given_up(workers: Workers) -> None:
    engine = ScriptedEngine(is_held=True)
    target = workers.target(engine)
    options = replace(OPTIONS, round_timeout_s=0.3, reconnect_s=0.0)
    with (
        Orchestrator(at(target), options=options) as pipeline,
        pytest.raises(TargetGone, match=r"no answer for 0\.3 s"),
    ):
        pipeline.run_with_result_sync(PROMPT)
    wait_until_no_session(target)
    assert not engine.jobs


async def test_a_cancelled_run_leaves_no_session_and_no_job(workers: Workers) -> None:
    engine, drafter = ScriptedEngine(is_held=True), Knowing()
    target, draft = workers.target(engine), workers.draft(drafter)
    async with Orchestrator(at(target), at(draft), OPTIONS) as pipeline:
        run = asyncio.ensure_future(pipeline.run(PROMPT))
        await async_wait_for("a job runs", lambda: engine.jobs)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        wait_for("no job is left", lambda: engine.jobs, not_)
        wait_until_no_session(target)
        engine.is_held = False
        assert is_expected(await pipeline.run_with_result(PROMPT))
    wait_for("no draft is left", lambda: drafter.live, not_)


async def test_sync_calls_work_inside_a_running_loop(workers: Workers) -> None:
    target = workers.target(ScriptedEngine())
    with Orchestrator(at(target), options=OPTIONS) as pipeline:
        assert is_expected(pipeline.run_with_result_sync(PROMPT))


def test_an_error_of_the_target_is_told_and_leaves_nothing(workers: Workers) -> None:
    target = workers.target(ScriptedEngine())
    with Orchestrator(at(target), options=OPTIONS) as pipeline:
        with pytest.raises(UserError, match="too long for the scripted target"):
            pipeline.run_with_result_sync([1] * 1000)
        with pytest.raises(InvalidRequest, match="empty"):
            pipeline.run_with_result_sync([])
        assert target.worker.stats()["sessions"] == 0
        assert is_expected(pipeline.run_with_result_sync(PROMPT))


def test_a_failed_pass_is_told_without_its_details(workers: Workers) -> None:
    target = workers.target(ScriptedEngine(fails=True))
    with Orchestrator(at(target), options=OPTIONS) as pipeline:
        with pytest.raises(UserError, match="the pass failed") as caught:
            pipeline.run_with_result_sync(PROMPT)
        assert "secret" not in str(caught.value)


def test_rounds_are_limited(workers: Workers) -> None:
    target = workers.target(ScriptedEngine())
    options = replace(OPTIONS, undrafted=4, max_rounds=3)
    with Orchestrator(at(target), options=options) as pipeline:
        result = pipeline.run_with_result_sync(PROMPT)
    assert (len(result.tokens), result.finish_reason) == (12, "rounds")
    assert result.tokens == EXPECTED[0][:12]


def test_telemetry_has_rounds_and_a_trace_and_no_text(workers: Workers, tmp_path: Path) -> None:
    target, draft = workers.target(ScriptedEngine()), workers.draft(Knowing(4))
    with Orchestrator(at(target), at(draft), OPTIONS) as pipeline:
        wait_for_drafters(pipeline)
        result = pipeline.run_with_result_sync(PROMPT)
        pipeline.export_telemetry(tmp_path / "telemetry.json")
    found = json.loads((tmp_path / "telemetry.json").read_text())
    [run] = found["runs"]
    assert run["tokens"] == sum(each["tokens"] for each in run["rounds"]) == len(result.tokens)
    assert all(each["depth"] <= each["nodes"] for each in run["rounds"])
    assert sum(each["accepted"] for each in run["rounds"]) > 0
    assert 0 < run["acceptance"] < 1
    assert {event["ph"] for event in found["traceEvents"]} == {"X"}
    assert len(found["traceEvents"]) == 2 * len(run["rounds"])
    ends = [event["ts"] + event["dur"] for event in found["traceEvents"]]
    assert max(ends) <= 1e6 * run["wall_s"] + 2
    assert str(PROMPT) not in (tmp_path / "telemetry.json").read_text()


def test_a_key_is_asked_for(workers: Workers, tmp_path: Path) -> None:
    target = workers.target(ScriptedEngine(), security=ServerSecurity(key="the-key"))
    with pytest.raises(TargetGone, match="unauthenticated"):
        Orchestrator(at(target)).connect_sync()
    (tmp_path / "key").write_text("the-key")
    security = ClientSecurity(key_file=tmp_path / "key")
    with Orchestrator(at(target), options=OPTIONS, security=security) as pipeline:
        assert is_expected(pipeline.run_with_result_sync(PROMPT))


def test_another_model_behind_the_same_address_is_not_mixed_in(workers: Workers) -> None:
    first = workers.target(ScriptedEngine())
    with Orchestrator(at(first), options=OPTIONS) as pipeline:
        first.stop()
        other = replace(MODEL, name="other", digest=b"another")
        workers.target(ScriptedEngine(), port=first.port, model=other)
        with pytest.raises(UserError, match="another model than before: other"):
            pipeline.run_with_result_sync(PROMPT)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"drafted": -1}, "drafted must be at least 0"),
        ({"draft_wait_s": -1.0}, "draft_wait_s"),
        ({"drafted": 64, "branches": 4}, "at most 128"),
        ({"top_p": 0.0}, "out of range"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        PipelineOptions(**options)


def test_a_slow_drafter_costs_its_wait_only(workers: Workers) -> None:
    class Slow(Knowing):
        def propose(self, requests):
            time.sleep(0.2)
            return super().propose(requests)

    target, draft = workers.target(ScriptedEngine()), workers.draft(Slow())
    options = replace(OPTIONS, draft_wait_s=0.01, max_tokens=200)
    with Orchestrator(at(target), at(draft), options) as pipeline:
        result = pipeline.run_with_result_sync(PROMPT)
    assert result.tokens == plain(PROMPT, SEED, 200)[0]
    # Most rounds: any one may meet a moment in which this machine is busy.
    assert median(each.draft_s for each in result.rounds) < 0.15


def test_a_client_needs_no_torch() -> None:
    code = "import sys, tinkercloud.speculative.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
