"""Names of drafters."""

import pytest

from tests.speculative.drafters.streams import stream
from tinkercloud.speculative.drafters.drafter import Draft, SilentDrafter
from tinkercloud.speculative.drafters.drafter_table import UnknownDrafterError, drafter_table


@pytest.mark.parametrize("name", drafter_table(50).names)
def test_a_drafter_has_the_name_that_it_is_made_by(name):
    assert drafter_table(50).make(name).name == name


def test_every_call_makes_a_new_drafter():
    table = drafter_table(50)
    assert table.make("suffix") is not table.make("suffix")


def test_more_drafters_may_be_named_and_take_what_follows_the_colon():
    class Model(SilentDrafter):
        def __init__(self, path: str):
            self.path = path

    made = drafter_table(50, {"model": Model}).make("model:/some/path:with colon")
    assert isinstance(made, Model)
    assert made.path == "/some/path:with colon"
    assert "model" not in drafter_table(50).names


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(UnknownDrafterError, match=r"'oracle'.*off, suffix, always-wrong, random"):
        drafter_table(50).make("oracle")


def test_off_drafts_nothing():
    sample = stream(0, [1])
    off = drafter_table(50).make("off")
    off.begin(sample)
    assert off.propose([(sample, 4)]) == [Draft()]
