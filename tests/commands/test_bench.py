"""`tinkercloud bench speculation`: what it makes of an engine's counts."""

from math import isnan

import pytest

from tinkercloud.commands.bench import AcceptanceSummary
from tinkercloud.speculative.draft_length.rounds import Kind, Reason, Round, Times
from tinkercloud.speculative.observability.telemetry import RoundReport, Telemetry


def test_acceptance_rows_and_times_are_of_a_sample_in_a_pass() -> None:
    telemetry = Telemetry()
    for verified, accepted, verify_ms in (((3, 1), (2, 1), 30.0), ((0, 0), (0, 0), 10.0)):
        done = Round((3, 1), ((0.9,) * verified[0], (0.9,) * verified[1]), verified, accepted,
                     Times(2.0, verify_ms))  # fmt: skip
        telemetry.record(RoundReport("suffix", Kind.SPECULATIVE, Reason.NONE, done))
    summary = AcceptanceSummary.of(telemetry.snapshot())
    assert summary.by_depth == pytest.approx((1.0, 1.0, 0.0))
    assert summary.num_tokens == 7, "one of each sample in each pass, and three drafted ones"
    assert summary.per_pass == pytest.approx(7 / 4)
    assert summary.rows == pytest.approx(8 / 4)
    assert (summary.draft_ms, summary.verify_ms) == (2.0, 20.0)


def test_a_depth_that_nobody_verified_has_no_acceptance() -> None:
    telemetry = Telemetry()
    done = Round((2,), ((0.9, 0.8),), (1,), (0,), Times(1.0, 10.0))
    telemetry.record(RoundReport("suffix", Kind.SPECULATIVE, Reason.NONE, done))
    first, second = AcceptanceSummary.of(telemetry.snapshot()).by_depth
    assert first == 0.0
    assert isnan(second)
