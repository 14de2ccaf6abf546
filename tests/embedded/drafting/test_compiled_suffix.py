"""The compiled suffix automata against those in Python: the same drafts, in bounded memory."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.speculative.drafters.streams import stream
from tinkercloud.embedded.drafting.compiled_suffix import CompiledAutomata, CompiledAutomaton
from tinkercloud.embedded.native.compiler import library
from tinkercloud.speculative.drafters.drafter import Draft, Stream
from tinkercloud.speculative.drafters.history import HistoryLimits
from tinkercloud.speculative.drafters.suffix import ROOT, Automaton, ContinuationRule
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.drafters.suffix_matches import SuffixSettings


@pytest.fixture
def compiled() -> CompiledAutomata:
    loaded = library()
    assert loaded is not None
    return CompiledAutomata(loaded)


def next_tokens(coins: random.Random, tokens: Sequence[int], size: int) -> list[int]:
    """New ones, or some that were there before."""
    num = coins.randrange(6)
    if coins.random() < 0.5:
        return coins.choices(range(size), k=num)
    at = coins.randrange(len(tokens))
    return list(tokens[at : at + num])


def drafts_of(drafter: SuffixDrafter, seed: int, size: int) -> list[Draft]:
    """Of samples that come and go in groups, over steps of their policy."""
    coins, live, drafts = random.Random(seed), list[Stream](), list[Draft]()
    for number in range(40):
        prompt = coins.choices(range(size), k=coins.randrange(1, 30))
        sample = stream(number, prompt, coins.choice("abc"), number // 12)
        sample.tokens.extend(coins.choices(range(size), k=coins.choice((0, 0, 9))))
        drafter.begin(sample)
        live.append(sample)
        for _ in range(15):
            written = coins.sample(live, coins.randrange(1, len(live) + 1))
            for sample in written:
                new = next_tokens(coins, sample.tokens, size)
                sample.tokens.extend(new)
                drafter.observe(sample, len(new))
            drafts += drafter.propose([(sample, coins.randrange(24)) for sample in written])
        while len(live) > 5:
            drafter.end(live.pop(coins.randrange(len(live))))
    return drafts


SETTINGS = {
    "default": SuffixSettings(),
    "mismatches end a match": SuffixSettings(skips_mismatches=False),
    "long drafts": SuffixSettings(rule=ContinuationRule(share=0.0), factor=8.0),
    "one suffix": SuffixSettings(rule=ContinuationRule(num_shorter=0, doubt=0.5)),
    "many suffixes": SuffixSettings(rule=ContinuationRule(num_shorter=15, long=3)),
    "little is kept": SuffixSettings(
        own_tokens=40, history=HistoryLimits(max_age=1, num_texts=2, text_tokens=60)
    ),
}


@pytest.mark.parametrize("size", [2, 5, 400])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_those_in_python(compiled: CompiledAutomata, name: str, size: int) -> None:
    for seed in range(3):
        plain = drafts_of(SuffixDrafter(SETTINGS[name]), seed, size)
        drafts = drafts_of(SuffixDrafter(SETTINGS[name], compiled), seed, size)
        assert drafts == plain
        assert sum(len(draft.tokens) for draft in drafts) > 50


def test_a_full_history_forgets_and_goes_on(compiled: CompiledAutomata) -> None:
    limits = HistoryLimits(num_bytes=40_000)
    drafter = SuffixDrafter(replace(SuffixSettings(), history=limits), compiled)
    assert any(draft.tokens for draft in drafts_of(drafter, 0, 400))
    assert drafter.history.num_bytes <= limits.num_bytes
    assert drafter.history.num_bytes == sum(
        text.automaton.num_bytes for group in drafter.history.groups() for text in group.all_texts()
    )


def test_texts_written_by_turns_have_the_states_of_those_in_python(
    compiled: CompiledAutomata,
) -> None:
    """A thousand tokens behind the root: more edges than a list is searched for."""
    coins = random.Random(0)
    plain, text = Automaton(), compiled.text()
    ends = [ROOT] * 3
    for _ in range(4000):
        at = coins.randrange(3)
        new = coins.choices(range(1000), k=3)
        before, ends[at] = ends[at], plain.write(ends[at], new)
        assert text.write(before, new) == ends[at]
    assert len(text) == len(plain)


def test_a_text_takes_less_memory_than_in_python(compiled: CompiledAutomata) -> None:
    coins = random.Random(0)
    text, plain = compiled.text(), Automaton()
    tokens = coins.choices(range(30), k=20_000)
    text.write(ROOT, tokens)
    plain.write(ROOT, tokens)
    assert 0.1 * plain.num_bytes < text.num_bytes < plain.num_bytes


def test_what_is_drafted_from_stays_when_the_group_forgets_it(compiled: CompiledAutomata) -> None:
    """The sample's match is in text whose automaton nobody else has any more."""
    matches, text = compiled.matches(SuffixSettings()), compiled.text()
    text.write(ROOT, list(range(100)))
    matches.use([text], list(range(10)))
    assert matches.draft(4).tokens == (10, 11, 12, 13)
    matches.use([], ())
    del text
    others = [CompiledAutomaton(compiled._library) for _ in range(50)]  # in its place, were it free
    for other in others:
        other.write(ROOT, [7] * 100)
    matches.read([10, 11], None)
    assert matches.draft(3).tokens == (12, 13, 14)
