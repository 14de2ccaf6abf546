"""Acceptance over the policy's steps: rates, trend and percentiles by category, kept on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from tinkercloud.speculative.observability.acceptance_log import (
    FILE,
    AcceptanceLog,
    AcceptanceTracker,
    read_moments,
    tracker_of,
)


def test_windows_weigh_steps_by_what_was_proposed_in_them():
    tracker = AcceptanceTracker()
    tracker.add(1, 100, 90)
    tracker.add(2, 10, 0)
    tracker.add(2, 10, 10, "code")
    assert tracker.rate() == pytest.approx(100 / 120)
    assert tracker.rate(1) == pytest.approx(0.5)
    assert tracker.rate(category="code") == 1.0
    assert tracker.rate(category="prose") is None
    assert AcceptanceTracker().rate() is None


def test_the_trend_is_the_slope_of_a_line_through_the_steps():
    tracker = AcceptanceTracker()
    for step in range(0, 40, 2):
        tracker.add(step, 1000, 500 + 5 * step)
    assert tracker.trend() == pytest.approx(0.005)
    steps, rates = np.arange(0, 40, 2), 0.5 + 0.005 * np.arange(0, 40, 2)
    assert tracker.trend() == pytest.approx(np.polyfit(steps, rates, 1)[0])
    for step in range(40, 50):
        tracker.add(step, 1000, 700)
    assert tracker.trend(10) == pytest.approx(0.0, abs=1e-12)


def test_percentiles_are_those_of_the_steps():
    tracker = AcceptanceTracker()
    for step in range(101):
        tracker.add(step, 100, step)
    percentiles = tracker.percentiles((10, 50, 90))
    assert percentiles == pytest.approx({10: 0.1, 50: 0.5, 90: 0.9})
    assert AcceptanceTracker().percentiles() == {}


def test_what_lies_behind_the_window_is_forgotten():
    tracker = AcceptanceTracker(window=3)
    for step in range(10):
        tracker.add(step, 10, 10 if step >= 7 else 0)
    assert tracker.rate() == 1.0


def test_more_than_was_proposed_cannot_be_accepted():
    with pytest.raises(ValueError, match="3 of 2"):
        AcceptanceTracker().add(0, 2, 3)


def test_the_summary_is_plain_json():
    tracker = AcceptanceTracker()
    tracker.add(1, 4, 3, "code")
    tracker.add(2, 4, 1, "prose")
    summary = json.loads(json.dumps(tracker.as_json()))
    assert summary["rate"] == 0.5
    assert summary["windows"]["1"] == 0.25
    assert summary["categories"]["code"]["rate"] == 0.75
    assert summary["categories"]["prose"]["windows"]["1"] == 0.25


# ---- on disk


def test_what_is_written_is_counted_once_and_read_back_as_it_was(tmp_path: Path):
    log = AcceptanceLog(tmp_path)
    log.add(1, 10, 5, "a")
    log.add(1, 10, 9, "b")
    assert log.unwritten_rate == pytest.approx(0.7)
    log.write(1, "draft-1")
    assert log.unwritten_rate is None
    log.write(1, "draft-1")  # nothing new: no line
    log.add(2, 4, 1, "a")
    log.write(2, "draft-2")
    moments = read_moments(tmp_path)
    assert [[line.category for line in lines] for lines in moments] == [["a", "b"], ["a"]]
    assert moments[1][0].draft == "draft-2" and moments[1][0].accepted == 1
    live, read = log.tracker.as_json(), tracker_of(moments).as_json()
    assert live == read and live["categories"]["a"]["rate"] == pytest.approx(6 / 14)


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path):
    log = AcceptanceLog(tmp_path)
    assert read_moments(tmp_path) == []
    log.add(1, 2, 1, "a")
    log.write(1, "")
    with (tmp_path / FILE).open("a", encoding="utf-8") as out:
        out.write('{"time": 1}\n{"time"')
    assert len(read_moments(tmp_path)) == 1
