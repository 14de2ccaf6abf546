"""Several drafters: who is taken, and who is left out."""

import asyncio
from dataclasses import dataclass

import pytest

from tinkercloud.errors import UpstreamUnreachable
from tinkercloud.proxy.drafters import GREEDY, DraftPool, DraftSession, agreed
from tinkercloud.proxy.suffix_source import SuffixSource
from tinkercloud.proxy.verification import RoundRequest
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft

ASKED = RoundRequest((1, 2), (), GREEDY, 4)


@dataclass
class Scripted:
    """delay_s: of its drafts. draft None: it fails."""

    name: str
    tokens: tuple[int, ...] | None
    delay_s: float = 0.0
    num_asked: int = 0
    num_cancelled: int = 0

    def open(self) -> DraftSession:
        return self

    async def draft(self, request: RoundRequest) -> Draft:
        self.num_asked += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.tokens is None:
            raise UpstreamUnreachable(f"{self.name} is down")
        return Draft(self.tokens)

    def close(self) -> None:
        pass


async def test_the_first_draft_wins_a_race_and_the_others_are_cancelled() -> None:
    slow, empty, fast = (
        Scripted("slow", (7,), 5.0),
        Scripted("empty", ()),
        Scripted("fast", (5, 6), 0.01),
    )
    pool = DraftPool([slow, empty, fast], "race", 10.0)
    assert await pool.open().draft(ASKED) == Draft((5, 6))
    assert slow.num_cancelled == 1
    assert [entry.num_taken for entry in pool.entries] == [0, 0, 1]


async def test_consensus_is_what_most_drafters_agree_on() -> None:
    drafts = [(5, 6, 7), (5, 6, 8), (5, 9)]
    pool = DraftPool([Scripted(str(one), one) for one in drafts], "consensus", 10.0)
    assert await pool.open().draft(ASKED) == Draft((5, 6))
    assert [entry.num_taken for entry in pool.entries] == [1, 1, 0]


@pytest.mark.parametrize(
    ("drafts", "common"),
    [
        ([], ()),
        ([(1, 2)], (1, 2)),
        ([(1, 2), (1, 3)], (1,)),
        ([(1,), (2,)], ()),
        ([(1, 2), (1, 2), (3, 2)], (1, 2)),
        ([(1, 2), (3, 2), (3, 2)], (3, 2)),
    ],
)
def test_agreement(drafts: list[tuple[int, ...]], common: tuple[int, ...]) -> None:
    assert agreed(drafts) == common


@pytest.mark.parametrize("failing", [Scripted("down", None), Scripted("late", (1,), 5.0)])
async def test_a_drafter_that_fails_is_left_out_for_a_while(failing: Scripted) -> None:
    pool = DraftPool([failing], "race", 0.02)
    sessions, before = pool.open(), failing.num_asked
    for _ in range(3):
        assert await sessions.draft(ASKED) == NO_DRAFT
    assert failing.num_asked == before + 1
    pool.entries[0].down_until = 1e-9  # a time that has passed
    await sessions.draft(ASKED)
    assert failing.num_asked == before + 2


async def test_a_draft_is_no_longer_than_was_asked_for() -> None:
    pool = DraftPool([Scripted("long", tuple(range(50)))], "race", 1.0)
    assert await pool.open().draft(ASKED) == Draft((0, 1, 2, 3))


async def test_a_sample_s_own_text_drafts_how_it_goes_on() -> None:
    session = SuffixSource().open()
    text = (3, 4, 5, 6, 7, 8, 9, 3, 4)
    assert (await session.draft(RoundRequest(text, (), GREEDY, 3))).tokens[:3] == (5, 6, 7)
    longer = (*text, 5, 6)
    assert (await session.draft(RoundRequest(longer, (), GREEDY, 2))).tokens[:2] == (7, 8)
    session.close()
