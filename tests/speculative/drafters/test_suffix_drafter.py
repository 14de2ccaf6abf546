"""The suffix drafter against counting, and on texts in which it must do well."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.speculative.drafters.counting_drafter import CountingDrafter
from tests.speculative.drafters.streams import stream, written
from tinkercloud.speculative.drafters.drafter import Draft
from tinkercloud.speculative.drafters.history import HistoryLimits
from tinkercloud.speculative.drafters.suffix import ContinuationRule
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.drafters.suffix_matches import SuffixSettings

SETTINGS = SuffixSettings(rule=ContinuationRule(share=0.05), skips_mismatches=False)
PROMPT = (1, 2, 3)


def json_lines(seed: int, num_lines: int) -> list[int]:
    """A record in each line: the same 14 tokens, and three that are any of 900."""
    values = np.random.default_rng(seed).integers(100, 1000, (num_lines, 3)).tolist()
    return [t for a, b, c in values for t in (10, 11, 12, 13, a, 14, 15, 16, b, 17, 18, 19, c, 20)]


def differing(text: list[int], share: float, seed: int) -> list[int]:
    """The text with that share of its tokens replaced by any of 900."""
    generator = np.random.default_rng(seed)
    others = generator.integers(100, 1000, len(text)).tolist()
    stays = generator.random(len(text)) >= share
    return [
        token if stay else other for token, other, stay in zip(text, others, stays, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_those_that_counting_finds(seed):
    generator = np.random.default_rng(seed)
    size = int(generator.integers(3, 7))
    settings = replace(SETTINGS, factor=float(generator.choice([0.5, 1.0, 3.0])))
    fast, slow = SuffixDrafter(settings), CountingDrafter(settings)
    number = 0
    for epoch in range(3):
        texts = generator.integers(0, size, (3, 30)).tolist()
        results = []
        for drafter in (fast, slow):
            groups = ["a", "a", "b"]
            samples = [stream(number + i, PROMPT, groups[i], epoch) for i in range(3)]
            results.append(written(drafter, list(zip(samples, texts, strict=True)), 6).drafts)
        number += 3
        assert results[0] == results[1]
        assert any(draft.tokens for draft in results[0])


def test_records_of_one_form_are_drafted_right_but_for_their_values():
    text = json_lines(0, 40)
    tally = written(SuffixDrafter(), [(stream(0, PROMPT), text)])
    most = len(text) / (3 * 40)  # rounds that end at a value
    assert tally.tokens_per_round > 0.4 * most


def test_text_that_repeats_itself_stands_almost_always():
    text = json_lines(0, 1) * 30
    tally = written(SuffixDrafter(), [(stream(0, PROMPT), text)])
    assert tally.acceptance > 0.95
    assert tally.tokens_per_round > 6


def test_sums_in_columns_are_drafted_but_for_their_digits():
    """Lines such as 1 2 + 3 4 = 4 6: five digits that nobody could know, three signs."""
    lines = np.random.default_rng(0).integers(100, 110, (60, 5)).tolist()
    text = [t for a, b, c, d, e in lines for t in (a, b, 10, c, d, 11, e, 12)]
    first = written(SuffixDrafter(), [(stream(0, PROMPT), text)])
    assert first.tokens_per_round > 1.25
    drafter = SuffixDrafter()
    for number in range(2):
        again = written(drafter, [(stream(number, PROMPT), text)])
    assert again.tokens_per_round > 8


def test_one_token_over_and_over_is_drafted_in_full():
    tally = written(SuffixDrafter(), [(stream(0, PROMPT), [7] * 200)])
    assert tally.acceptance == 1.0
    assert tally.tokens_per_round > 6


def test_a_member_that_writes_what_another_wrote_is_drafted_from_its_first_token():
    text = np.random.default_rng(0).integers(0, 1000, 400).tolist()
    drafter = SuffixDrafter()
    first = written(drafter, [(stream(0, PROMPT), text)])
    second = written(drafter, [(stream(1, PROMPT), text)])
    assert first.tokens_per_round < 1.2
    assert second.tokens_per_round > 8
    assert second.acceptance == 1.0


def test_live_members_learn_from_one_another():
    text = np.random.default_rng(0).integers(0, 1000, 100).tolist()
    drafter, ahead, behind = SuffixDrafter(), stream(0, PROMPT), stream(1, PROMPT)
    drafter.begin(ahead)
    drafter.begin(behind)
    ahead.tokens.extend(text[:50])
    drafter.observe(ahead, 50)
    (draft,) = drafter.propose([(behind, 6)])
    assert draft.tokens == tuple(text[:6])


def test_another_group_is_not_drafted_from():
    text = list(range(100, 150))
    drafter = SuffixDrafter()
    written(drafter, [(stream(0, PROMPT, "one"), text)])
    assert written(drafter, [(stream(1, PROMPT, "other"), text)]).drafted == 0


def test_later_epochs_are_drafted_from_earlier_ones():
    text = np.random.default_rng(0).integers(0, 1000, 300).tolist()
    drafter = SuffixDrafter()
    results = []
    for epoch in range(3):
        samples = [
            (stream(4 * epoch + i, PROMPT, epoch=epoch), differing(text, 0.1, 4 * epoch + i))
            for i in range(4)
        ]
        results.append(written(drafter, samples).tokens_per_round)
    assert results[0] < results[1]
    assert results[2] > 2.5


def test_the_prompt_is_drafted_from():
    prompt = list(range(100, 200))
    tally = written(SuffixDrafter(), [(stream(0, prompt), prompt[20:80])])
    assert tally.tokens_per_round > 5


def test_behind_a_token_that_is_another_the_text_before_is_gone_on_with():
    text = list(range(100, 140))
    sample = stream(0, text)
    drafter = SuffixDrafter()
    drafter.begin(sample)
    sample.tokens.extend(text[:10])
    drafter.observe(sample, 10)
    assert drafter.propose([(sample, 4)])[0].tokens == tuple(text[10:14])
    sample.tokens.extend([*text[10:12], 999])  # two were accepted, then another came
    drafter.observe(sample, 3)
    assert drafter.propose([(sample, 4)])[0].tokens == tuple(text[13:17])
    strict = SuffixDrafter(SETTINGS)
    other = stream(1, text)
    strict.begin(other)
    other.tokens.extend([*text[:12], 999])
    strict.observe(other, 13)
    assert strict.propose([(other, 4)])[0].tokens == ()


def test_what_is_seen_after_it_soon_says_more_than_text_behind_a_mismatch():
    first, second = list(range(100, 120)), [*range(200, 204), 115, *range(204, 220)]
    sample = stream(0, [*first, *second])
    drafter = SuffixDrafter()
    drafter.begin(sample)
    sample.tokens.extend(first[:6])
    drafter.observe(sample, 6)
    assert drafter.propose([(sample, 2)])[0].tokens == tuple(first[6:8])
    for token in second[:6]:  # another text: each of its tokens halves what the first one says
        sample.tokens.append(token)
        drafter.observe(sample, 1)
    assert drafter.propose([(sample, 3)])[0].tokens == tuple(second[6:9])


def test_records_whose_values_are_new_take_fewer_rounds_where_mismatches_are_skipped():
    """Behind a value nothing but the form tells what comes."""
    text = json_lines(0, 40)
    skipping, strict = (
        written(SuffixDrafter(settings), [(stream(0, PROMPT), text)]).tokens_per_round
        for settings in (replace(SETTINGS, skips_mismatches=True), SETTINGS)
    )
    assert skipping > 1.3 * strict


def test_the_longest_match_wins_and_of_equals_the_samples_own():
    drafter = SuffixDrafter(SETTINGS)
    written(drafter, [(stream(0, PROMPT), [50, 51, 52, 90, 51, 52, 90, 52, 91])])
    sample = stream(1, PROMPT)
    drafter.begin(sample)
    sample.tokens.extend([52, 80, 60, 61, 52])
    drafter.observe(sample, 5)
    assert drafter.propose([(sample, 1)])[0].tokens == (80,)
    sample.tokens.extend([70, 51, 52])
    drafter.observe(sample, 3)
    assert drafter.propose([(sample, 1)])[0].tokens == (90,)


def test_a_draft_is_no_longer_than_asked_nor_than_its_match_allows():
    drafter = SuffixDrafter(SuffixSettings(factor=2.0))
    sample = stream(0, list(range(100, 200)))
    drafter.begin(sample)
    sample.tokens.append(120)
    drafter.observe(sample, 1)
    assert drafter.propose([(sample, 5)])[0].tokens == (121, 122)
    sample.tokens.extend([121, 122, 123])
    drafter.observe(sample, 3)
    assert drafter.propose([(sample, 5)])[0].tokens == (124, 125, 126, 127, 128)
    assert drafter.propose([(sample, 0)]) == [Draft()]


@pytest.mark.parametrize("at_a_time", [2, 7, 60])
def test_tokens_may_be_observed_late_and_many_at_a_time(at_a_time):
    text = json_lines(3, 30)
    results = []
    for step in (1, at_a_time):
        drafter, sample = SuffixDrafter(), stream(0, PROMPT)
        drafter.begin(sample)
        for at in range(0, len(text), step):
            sample.tokens.extend(text[at : at + step])
            drafter.observe(sample, len(text[at : at + step]))
        results.append(drafter.propose([(sample, 8)])[0])
    assert results[0] == results[1]
    assert results[0].tokens


def test_a_sample_that_was_begun_before_is_taken_up_where_it_is():
    text = list(range(100, 130))
    drafter = SuffixDrafter()
    written(drafter, [(stream(0, PROMPT), text)])
    resumed = stream(1, PROMPT)
    resumed.tokens.extend(text[:10])
    drafter.begin(resumed)
    assert drafter.propose([(resumed, 4)])[0].tokens == (110, 111, 112, 113)


def test_confidence_tells_what_stands_from_what_falls():
    texts = [differing(json_lines(0, 30), 0.1, i) for i in range(8)]
    drafter = SuffixDrafter()
    tally = [written(drafter, [(stream(i, PROMPT), text)]) for i, text in enumerate(texts)]
    shares = [c for one in tally for draft in one.drafts for c in draft.confidences]
    assert all(0 < share <= 1 for share in shares)
    sure, unsure = first_tokens(texts, drafter)
    assert sure > unsure + 0.2


def first_tokens(texts: list[list[int]], drafter: SuffixDrafter) -> tuple[float, float]:
    """How often the first drafted token is right, at confidences over and under a half."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    for number, text in enumerate(texts):
        sample = stream(100 + number, PROMPT, epoch=1)
        drafter.begin(sample)
        for token in differing(text, 0.2, 100 + number):
            (draft,) = drafter.propose([(sample, 1)])
            if draft.tokens:
                right[draft.confidences[0] > 0.5].append(draft.tokens[0] == token)
            sample.tokens.append(token)
            drafter.observe(sample, 1)
        drafter.end(sample)
    return float(np.mean(right[True])), float(np.mean(right[False]))


def test_own_output_is_forgotten_beyond_its_bound():
    drafter = SuffixDrafter(SuffixSettings(own_tokens=50, history=HistoryLimits(num_texts=0)))
    sample = stream(0, PROMPT)
    drafter.begin(sample)
    sample.tokens.extend(range(100, 140))
    drafter.observe(sample, 40)
    sample.tokens.extend(range(200, 240))
    drafter.observe(sample, 40)
    sample.tokens.append(110)
    drafter.observe(sample, 1)
    assert drafter.propose([(sample, 4)]) == [Draft()]
    sample.tokens.append(210)
    drafter.observe(sample, 1)
    assert drafter.propose([(sample, 2)])[0].tokens == (211, 212)


def test_a_token_costs_tens_of_microseconds():
    texts = [differing(json_lines(i, 36), 0.1, i) for i in range(8)]
    drafter = SuffixDrafter()
    began = time.process_time()
    tally = [
        written(drafter, [(stream(8 * m + i, PROMPT, i), t) for i, t in enumerate(texts)])
        for m in range(3)
    ]
    per_token_s = (time.process_time() - began) / sum(one.emitted for one in tally)
    assert per_token_s < 200e-6  # 20 where nothing else runs
