"""Names of drafters."""

import pytest

from tests.speculative.drafters.streams import stream
from tests.speculative.drafters.trial_drafters import trial_table
from tinkercloud.speculative.drafters.drafter import Draft, Drafter
from tinkercloud.speculative.drafters.drafter_table import DrafterTable, UnknownDrafterError


@pytest.mark.parametrize("name", trial_table(50).names)
def test_a_drafter_has_the_name_that_it_is_made_by(name):
    assert trial_table(50).make(name).name == name


def test_every_call_makes_a_new_drafter():
    table = DrafterTable()
    assert table.make("suffix") is not table.make("suffix")


def test_more_drafters_may_be_named_and_take_what_follows_the_colon():
    class Model(Drafter):
        def __init__(self, path: str):
            self.path = path

    model = DrafterTable({"model": Model}).make("model:/some/path:with colon")
    assert isinstance(model, Model)
    assert model.path == "/some/path:with colon"
    assert "model" not in DrafterTable().names


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(UnknownDrafterError, match=r"'oracle'.*off, suffix, always-wrong, random"):
        trial_table(50).make("oracle")


def test_off_drafts_nothing():
    sample = stream(0, [1])
    off = DrafterTable().make("off")
    off.begin(sample)
    assert off.propose([(sample, 4)]) == [Draft()]
