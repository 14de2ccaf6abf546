"""What a group wrote is kept within its memory, forgotten by age, and holds nothing else."""

import itertools
import random

import pytest

from tests.speculative.drafters.streams import stream, written
from tinkercloud.speculative.drafters.history import HistoryLimits
from tinkercloud.speculative.drafters.suffix import ROOT
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.drafters.suffix_matches import SuffixSettings

PROMPT = (1, 2, 3)


def drafter(**limits: int) -> SuffixDrafter:
    return SuffixDrafter(SuffixSettings(history=HistoryLimits(**limits)))


def drafts_any(suffix: SuffixDrafter, number: int, group: str, text: list[int], epoch: int = 0):
    """Whether a sample that writes the text finds it known beforehand."""
    sample = stream(number, PROMPT, group, epoch)
    suffix.begin(sample)
    (draft,) = suffix.propose([(sample, 3)])
    suffix.end(sample)
    return draft.tokens == tuple(text[:3])


def test_text_is_forgotten_when_its_version_is_too_old():
    text = list(range(100, 120))
    suffix = drafter(max_age=2)
    written(suffix, [(stream(0, PROMPT, "a", epoch=5), text)])
    assert drafts_any(suffix, 1, "a", text, epoch=7)
    assert not drafts_any(suffix, 2, "a", text, epoch=8)


def test_a_live_sample_of_a_forgotten_version_goes_on_without_being_kept():
    text = list(range(100, 120))
    suffix = drafter(max_age=2)
    old = stream(0, PROMPT, "a", epoch=0)
    suffix.begin(old)
    suffix.begin(stream(1, PROMPT, "b", epoch=9))
    before = suffix.history.num_bytes
    old.tokens.extend(text * 2)
    suffix.observe(old, 2 * len(text))
    assert suffix.history.num_bytes == before
    assert suffix.propose([(old, 3)])[0].tokens == (100, 101, 102)


def test_groups_without_text_are_forgotten_with_it():
    suffix = drafter(max_age=2)
    for epoch in range(10):
        written(suffix, [(stream(epoch, PROMPT, f"group {epoch}", epoch), [1, 2, 3, 4])])
    assert len(suffix.history) == 3


def test_the_newest_versions_of_a_group_are_kept():
    suffix = drafter(num_texts=2)
    texts = [list(range(100 * i, 100 * i + 10)) for i in range(1, 5)]
    for epoch, text in enumerate(texts):
        written(suffix, [(stream(epoch, (*PROMPT, epoch), "a", epoch), text)])
    drafted = []
    for number, text in enumerate(texts):
        sample = stream(10 + number, PROMPT, "a", 3)
        suffix.begin(sample)
        sample.tokens.extend(text[:4])
        suffix.observe(sample, 4)
        drafted.append(suffix.propose([(sample, 2)])[0].tokens == tuple(text[4:6]))
        suffix.end(sample)
    assert drafted == [False, False, True, True]


def test_a_full_text_makes_room_for_another():
    suffix = drafter(num_texts=2, text_tokens=50)
    coins = random.Random(0)
    for number in range(40):
        text = coins.choices(range(1000), k=30)
        written(suffix, [(stream(number, PROMPT, "a"), text)])
    assert suffix.history.num_bytes < 2 * 90 * 250
    assert drafts_any(suffix, 99, "a", text)


def test_memory_is_bounded_and_the_least_recently_used_group_goes_first():
    suffix = drafter(num_bytes=60_000)
    coins = random.Random(0)
    texts = [coins.choices(range(1000), k=100) for _ in range(20)]
    for number, text in enumerate(texts):
        written(suffix, [(stream(number, PROMPT, f"group {number}"), text)])
        assert suffix.history.num_bytes <= 60_000
        assert drafts_any(suffix, 100 + number, "group 0", texts[0])  # used again and again
    assert len(suffix.history) < 20
    assert drafts_any(suffix, 200, "group 19", texts[19])
    assert not drafts_any(suffix, 201, "group 1", texts[1])


def test_memory_is_bounded_even_when_every_group_is_live():
    suffix = drafter(num_bytes=20_000)
    coins = random.Random(0)
    samples = [
        (stream(i, PROMPT, f"group {i}"), coins.choices(range(1000), k=200)) for i in range(8)
    ]
    written(suffix, samples)
    assert all(sample.tokens[3:] == text for sample, text in samples)
    assert suffix.history.num_bytes <= 20_000


def test_what_is_live_is_freed_last():
    text = list(range(100, 150))
    suffix = drafter(num_bytes=60_000)
    live = stream(0, PROMPT, "live")
    suffix.begin(live)
    live.tokens.extend(text)
    suffix.observe(live, len(text))
    coins = random.Random(0)
    for number in range(1, 20):
        written(suffix, [(stream(number, PROMPT, number), coins.choices(range(1000), k=100))])
    assert len(suffix.history) < 20
    assert drafts_any(suffix, 99, "live", text)


def test_a_long_prompt_is_kept_from_its_end():
    prompt = random.Random(0).sample(range(100_000), 2000)
    suffix = drafter(prompt_tokens=100)
    sample = stream(0, prompt)
    suffix.begin(sample)
    assert suffix.history.num_bytes < 100 * 250
    sample.tokens.extend(prompt[1950:1954])
    suffix.observe(sample, 4)
    assert suffix.propose([(sample, 2)])[0].tokens == tuple(prompt[1954:1956])


@pytest.mark.parametrize("seed", range(10))
def test_the_count_of_bytes_is_what_is_there_and_no_string_is_there_that_was_not_written(seed):
    """Samples of several versions in turns, so that texts fill, expire and are freed meanwhile."""
    coins = random.Random(seed)
    suffix = drafter(num_bytes=20_000, max_age=2, num_texts=3, text_tokens=60)
    live: list = []
    wrote: list[list[int]] = []
    for number in range(60):
        sample = stream(number, coins.choices(range(6), k=12), coins.choice("abc"), number // 10)
        wrote.append(sample.tokens)
        suffix.begin(sample)
        live.append(sample)
        for _ in range(10):
            sample = coins.choice(live)
            if coins.random() < 0.5:
                suffix.propose([(sample, 4)])
            new = coins.choices(range(6), k=coins.randrange(4))
            sample.tokens.extend(new)
            suffix.observe(sample, len(new))
        while len(live) > 5:
            suffix.end(live.pop(coins.randrange(len(live))))
        groups = suffix.history.groups()
        assert suffix.history.num_bytes == sum(
            text.automaton.num_bytes for group in groups for text in group.all_texts()
        )
    for group in groups:
        for text in group.all_texts():
            for string in itertools.product(range(6), repeat=4):
                if text.automaton.follow(ROOT, 0, string)[1] == 4:
                    assert any(stands_in(string, tokens) for tokens in wrote)


def stands_in(string: tuple[int, ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[i : i + 4]) == string for i in range(len(tokens) - 3))
