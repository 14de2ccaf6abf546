"""Ratios of what ran in turns, on a machine whose speed changes from turn to turn."""

import pytest

from benchmarks.speculation_rl import Epochs, Takes
from tinkercloud.commands.bench import TimedRun, Turns


def turns(*seconds: float) -> Turns:
    return Turns([TimedRun([], each, ()) for each in seconds])


def test_a_machine_that_changes_its_speed_changes_no_ratio():
    """The plain engine alone had a turn of the machine's best minute, which the fastest runs of
    both would take for the drafts' fault."""
    plain, drafted = turns(2.0, 3.0, 1.5, 2.0, 3.0), turns(1.0, 1.5, 1.2, 1.0, 1.5)
    assert drafted.times(plain) == 2.0
    assert plain.typical.seconds == 2.0 and drafted.typical.seconds == 1.2


def test_turns_of_two_engines_are_as_many():
    with pytest.raises(ValueError, match="shorter"):
        turns(1.0).times(turns(1.0, 1.0))


def test_epochs_are_summed_within_a_take():
    epochs = Epochs(
        4,
        plain_s=Takes([[4.0, 8.0, 4.0], [2.0, 4.0, 1.0], [2.0, 4.0, 2.0]]),
        drafted_s=Takes([[4.0, 8.0, 4.0], [1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]),
        fixed_s={2: Takes([[8.0, 16.0, 8.0], [1.0, 2.0, 1.0], [3.0, 6.0, 3.0]])},
    )
    assert epochs.times(0, 1) == 1.0 and epochs.times(1) == 2.0
    assert epochs.hindsight(1, 3).best == (0, 1.0)
    assert epochs.plain_s.typical(slice(1, None)) == 4.0
