"""The load benchmark: small forms of its parts against a real server, and what it calls lost."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import load_attacks, load_clients, load_day, load_latency
from benchmarks.lib.bystander import SamplingBystander, Seen
from benchmarks.lib.footprint import Footprint, History, footprint
from benchmarks.lib.report import Target
from benchmarks.lib.sdk_clients import SAMPLING, TRAINING, Work
from benchmarks.lib.server import Served
from benchmarks.lib.wire_client import Refused, WireClient
from tests.serving import Server, start_server
from tinkercloud.backends.fake import TINY

SERVED = Served(TINY.name, (), TINY.max_context_length, TINY.vocab_size)
LOAD = load_clients.Load(sampling=2, training=2, processes=1, seconds=1.0, pace_s=0.05)


def met(targets: list[Target]) -> dict[str, bool]:
    return {target.name: target.met for target in targets}


async def test_clients_of_the_sdk_get_right_answers_that_are_on_record(fake_server: Server):
    result = await load_clients.measure(fake_server, SERVED, LOAD)
    assert (result.failed, result.lost) == (0, 0)
    for row in result.rows():
        cells = dict(zip(load_clients.COLUMNS, row, strict=True))
        assert cells["sent"] == cells["answered"] >= 2  # each client once at least
    assert len(result.work[TRAINING].losses) == 2
    assert "2 sampling and 2 training clients" in result.about()


def loaded() -> load_clients.Loaded:
    server = Footprint(100.0, 30)
    return load_clients.Loaded(
        load=LOAD,
        work={
            SAMPLING: Work(sent=3, latencies_s=[0.1, 0.1, 0.2]),
            TRAINING: Work(sent=1, latencies_s=[0.3]),
        },
        bystander=Seen(poll_s=[0.01]),
        before=server,
        history=History([(float(second), server) for second in range(9)]),
        after=server,
        on_record={SAMPLING: 3, TRAINING: 1},
    )


def test_what_one_side_knows_and_the_other_does_not_is_lost():
    assert loaded().lost == 0
    assert replace(loaded(), on_record={SAMPLING: 2, TRAINING: 1}).lost == 1
    unanswered = {**loaded().work, TRAINING: Work(sent=2, latencies_s=[0.3])}
    assert replace(loaded(), work=unanswered).lost == 1


def test_memory_and_descriptors_that_grow_are_missed_targets():
    assert all(met(loaded().targets()).values())
    growing = [(float(s), Footprint(100 + 10.0 * s, 30 + s)) for s in range(9)]
    missed = [
        name
        for name, is_met in met(replace(loaded(), history=History(growing)).targets()).items()
        if not is_met
    ]
    assert missed == ["memory: last quarter by second quarter", "descriptors: the same"]


def test_models_that_are_trained_alike_have_the_same_losses():
    assert load_clients._deviations([[3.0, 2.0], [3.0, 2.0, 1.0], [3.0]]) == 0
    assert load_clients._deviations([[3.0, 2.5], [3.0, 2.0, 1.0], [3.0]]) == 1


async def test_a_bystander_s_times_begin_when_its_samples_are_due(fake_server: Server):
    address = (fake_server.base_url, fake_server.api_key, TINY.name)
    bystander = await SamplingBystander.connect(*address)
    async with bystander.watching() as seen:
        await asyncio.sleep(0.25)
    bystander.close()
    assert len(seen.whole_s) == len(seen.poll_s) >= 2
    assert seen.whole_ms(0.5) > seen.poll_ms(0.5) > 0
    assert seen.failures == []


async def test_the_client_over_sockets_says_what_was_refused(fake_server: Server):
    api = WireClient(fake_server.base_url, "tml-of-nobody")
    with pytest.raises(Refused, match="401"):
        await api.post("create_session")
    api.close()


@pytest.mark.slow
async def test_an_attack_is_answered_and_its_bystander_is_too(fake_server: Server):
    names = ["half-open connections", "learning rates NaN and 1e308", "10000 queued samples"]
    results, period_s = await load_attacks.measure(fake_server, SERVED, names, 1.5, scale=0.01)
    assert period_s >= 0.1
    assert [each.name for each in results] == [*names, "10000 queued samples, who trains"]
    assert [each.failed for each in results] == [0, 0, 0, 0]
    assert results[0].answers == "opened: 15"
    assert "200 failed" in results[1].answers
    for each in results:
        cells = dict(zip(load_attacks.COLUMNS, each.cells(), strict=True))
        assert cells["p99 during"] > 0
    assert len(load_attacks.targets(results)) == 5


@pytest.mark.slow
async def test_a_day_of_scripts_has_the_server_before_and_after(fake_server: Server):
    day = load_day.Day(seconds=0.1, at_once=1, kept_s=5.0, settle_s=0.1, first=0)
    lived = await load_day.measure(fake_server, SERVED, day)
    assert (lived.failures, lived.ended["closes"]) == ([], 1)
    assert [row[0] for row in lived.rows()] == list(load_day.NAMES.values())
    assert met(lived.targets())["scripts that failed"]
    grown = replace(lived, after=replace(lived.after, models=lived.before.models + 1))
    assert not met(grown.targets())["models in memory when all is over"]


@pytest.mark.slow
async def test_a_script_of_a_day_that_fails_says_why(fake_server: Server):
    day = load_day.Day(seconds=0.1, at_once=1, kept_s=5.0, settle_s=0.1, first=0)
    lived = await load_day.measure(fake_server, replace(SERVED, base_model="none"), day)
    assert len(lived.failures) == 1
    assert lived.failures[0].startswith("one that closes ended with status 1 before it was done: ")
    assert "A script failed: one that closes ended" in lived.about()
    assert not met(lived.targets())["scripts that failed"]


def test_a_script_that_ends_badly_after_its_work_is_told_apart() -> None:
    assert load_day.failure("is killed", -signal.SIGKILL, b"done", b"") is None
    assert load_day.failure("leaves", 0, b"done", b"") is None
    late = load_day.failure("leaves", -signal.SIGABRT, b"done", b"")
    assert late == "one that leaves ended with status -6 after all was done: it said nothing"


async def test_every_operation_has_a_latency_by_both_clients(sdk_server: Server):
    servers = {load_latency.DISK: sdk_server}
    rows = await load_latency.measure(servers, load_latency.Volume(1, 3, 8))
    clients = {"backend alone", "disk", "HTTP", "SDK", "SDK, constant answers"}
    assert {row.client for row in rows} == clients
    assert [row.failed for row in rows] == [0] * len(rows)
    assert met(load_latency.targets(rows))["operations that failed"]
    assert len(load_latency.targets(rows)) == 5
    assert "*Constant answers*" in load_latency.about(rows)


def test_the_footprint_of_a_server_grows_by_what_is_opened(tmp_path: Path):
    """Of one that nobody else has connections to, which would end meanwhile."""
    with start_server("--backend", "fake", data_dir=tmp_path / "data") as server:
        assert server.process is not None
        with server.http() as first, server.http() as second:
            first.get("/api/v1/healthz")
            held = footprint(server.process.pid)
            second.get("/api/v1/healthz")
            assert footprint(server.process.pid).descriptors == held.descriptors + 1
    assert held.memory_mb > 20
