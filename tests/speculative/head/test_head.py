"""The draft head: whole sequences against row by row, its cache, its vocabulary, its draws."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.decoding.rows import row_params
from tests.speculative.head.head_scene import (
    V,
    a_head,
    drafted_outputs,
    sequences,
    target_config,
    target_weights,
)
from tinkercloud.decoding.sampler import gumbel_noise, gumbel_noise_at, sample
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.draft import ChainStart, draft_chains, draw
from tinkercloud.speculative.head.head import (
    FrozenRows,
    Head,
    HeadConfig,
    default_layers,
    initial_params,
)
from tinkercloud.speculative.head.unroll import unroll
from tinkercloud.speculative.head.vocabulary import DraftVocabulary

a_row = partial(row_params, seed=7, sample_index=2, position=5)


@pytest.mark.parametrize("layers", [(4,), (1, 2, 4)])
def test_whole_sequences_compute_what_drafting_row_by_row_computes(layers):
    head, params = a_head(layers)
    hidden, tokens = sequences(2, 9, len(layers))
    unrolled = unroll(head, params, hidden, tokens, 4)
    for b in range(2):
        for begin in range(9):
            steps = min(4, 9 - begin)
            slow = drafted_outputs(head, params, (hidden[b], tokens[b]), begin, steps)
            for step, output in enumerate(slow):
                torch.testing.assert_close(
                    unrolled[step][b, begin + step], output, rtol=1e-4, atol=1e-5
                )


def test_padding_changes_nothing_before_it():
    head, params = a_head()
    hidden, tokens = sequences(1, 10, 3)
    other_hidden, other_tokens = hidden.clone(), tokens.clone()
    other_hidden[:, 6:] = 99.0
    other_tokens[:, 6:] = 0
    for a, b in zip(
        unroll(head, params, hidden, tokens, 3),
        unroll(head, params, other_hidden, other_tokens, 3),
        strict=True,
    ):
        torch.testing.assert_close(a[:, :6], b[:, :6])


def test_sequences_of_a_ragged_step_do_not_see_one_another():
    head, params = a_head()
    hidden, tokens = sequences(3, 70, 3)
    feature = head.fuse(params, hidden)
    together = HeadCache(head, 4)
    alone = [HeadCache(head, 1) for _ in range(3)]
    slots, at = [2, 0, 3], [0, 0, 0]
    for counts in ([4, 1, 2], [1, 3, 3], [40, 61, 1], [2, 2, 2]):
        most = max(counts)
        rows = [slice(a, a + most) for a in at]
        padded = [
            torch.nn.functional.pad(feature[b, r], (0, 0, 0, most)) for b, r in enumerate(rows)
        ]
        ids = [torch.nn.functional.pad(tokens[b, r], (0, most)) for b, r in enumerate(rows)]
        new = NewRows(
            slots,
            torch.stack([x[:most] for x in padded]),
            torch.stack([x[:most] for x in ids]),
            counts,
        )
        output = extend(head, params, together, new)
        for b, count in enumerate(counts):
            span = slice(at[b], at[b] + count)
            new = NewRows([0], feature[b : b + 1, span], tokens[b : b + 1, span], [count])
            expected = extend(head, params, alone[b], new)
            torch.testing.assert_close(output[b, :count], expected[0], rtol=1e-4, atol=1e-5)
            at[b] += count
    assert [together.lengths[s] for s in slots] == at


def test_after_a_rewind_everything_is_as_if_the_rows_had_never_been():
    head, params = a_head()
    hidden, tokens = sequences(1, 12, 3)
    feature = head.fuse(params, hidden)

    def add(cache: HeadCache, start: int, stop: int) -> Tensor:
        new = NewRows([0], feature[:, start:stop], tokens[:, start:stop], [stop - start])
        return extend(head, params, cache, new)

    cache, other = HeadCache(head, 1), HeadCache(head, 1)
    add(cache, 0, 5)
    add(cache, 8, 12)
    cache.rewind(0, 5)
    add(other, 0, 5)
    torch.testing.assert_close(add(cache, 5, 8), add(other, 5, 8), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has 8 positions"):
        cache.rewind(0, 9)


def test_layers_that_do_not_exist_are_refused():
    assert default_layers(30) == (3, 15, 30)
    assert default_layers(1) == (1,)
    with pytest.raises(ValueError, match="from 1 to 4"):
        HeadConfig.of(target_config(), (5,))


def test_parameters_follow_from_the_seed():
    config = HeadConfig.of(target_config())
    a, b, c = (initial_params(config, seed) for seed in (1, 1, 2))
    assert {n: t.shape for n, t in a.items()} == config.shapes()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["q_proj"], c["q_proj"])


# ---- the vocabulary


def test_the_most_frequent_tokens_are_kept():
    counts = torch.tensor([5, 0, 9, 9, 1, 2])
    assert DraftVocabulary.most_frequent(counts, 3).ids.tolist() == [0, 2, 3]
    with_end = DraftVocabulary.most_frequent(counts, 3, always=[4])
    assert with_end.ids.tolist() == [2, 3, 4]
    assert with_end.index.tolist() == [-1, -1, 0, 1, 2, -1]
    assert with_end.coverage(counts) == pytest.approx(19 / 26)
    with pytest.raises(ValueError, match="from 0 to 5"):
        DraftVocabulary.of([6], 6)


def test_the_trimmed_logits_are_rows_of_the_whole():
    weights = target_weights()
    config = HeadConfig.of(target_config())
    params = initial_params(config, 0)
    numbers = torch.Generator().manual_seed(0)
    output = torch.randn(3, config.target.hidden_size, generator=numbers)
    trimmed = DraftVocabulary.of([3, 11, 60], V)
    small, whole = (
        Head(config, FrozenRows.of(weights, v)).logits(params, output)
        for v in (trimmed, DraftVocabulary.of(range(V), V))
    )
    torch.testing.assert_close(small, whole[:, [3, 11, 60]])


# ---- drawing with the target's noise


def test_noise_of_some_tokens_is_that_of_the_sampler():
    ids = torch.tensor([0, 5, 17, 300])
    rows = [a_row(), a_row(position=6), a_row(seed=8)]
    for noise, row in zip(gumbel_noise_at(rows, ids), rows, strict=True):
        whole = gumbel_noise(row.params.seed, row.sample_index, row.position, 1000)
        assert torch.equal(noise, whole[ids])


def noise_at(rows, temperature):
    noise = gumbel_noise_at(rows, torch.arange(V))
    return noise if temperature else torch.zeros_like(noise)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8)])
def test_a_draft_with_the_targets_distribution_draws_the_targets_token(temperature, top_k, top_p):
    vocabulary = DraftVocabulary.of(range(V), V)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, V, generator=generator) * 2
    rows = [a_row(temperature=temperature, cut=(top_k, top_p), position=i) for i in range(40)]
    drawn = draw(logits, rows, vocabulary)
    assert torch.equal(drawn.tokens, sample(logits, rows).tokens)
    weights = torch.sort(drawn.probs.log() + noise_at(rows, temperature), descending=True).values
    lead = weights[:, 0] - weights[:, 1]
    assert torch.allclose(drawn.confidences, 1 - torch.exp(-lead), atol=1e-4)


def test_on_a_trimmed_vocabulary_the_token_is_the_targets_wherever_it_can_be():
    vocabulary = DraftVocabulary.of(range(0, V, 2), V)
    logits = torch.randn(300, V, generator=torch.Generator().manual_seed(1))
    rows = [a_row(position=i) for i in range(300)]
    target = sample(logits, rows).tokens
    tokens = draw(logits[:, ::2], rows, vocabulary).tokens
    assert torch.equal(tokens == target, target % 2 == 0)


def test_other_noise_would_rarely_give_the_targets_token():
    vocabulary = DraftVocabulary.of(range(V), V)
    logits = torch.zeros(200, V)
    rows = [a_row(position=i) for i in range(200)]
    target = sample(logits, rows).tokens
    tokens = draw(logits, [a_row(position=i, seed=9) for i in range(200)], vocabulary).tokens
    assert (tokens == target).float().mean() < 0.1


def test_ties_go_to_the_lowest_id():
    vocabulary = DraftVocabulary.of([4, 7, 9], V)
    drawn = draw(torch.zeros(1, 3), [a_row(temperature=0.0)], vocabulary)
    assert drawn.tokens.tolist() == [4]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "cut": (5, 1.0)}], ids=str)
def test_a_chain_is_what_drafting_token_by_token_gives(more):
    head, params = a_head()
    hidden, tokens = sequences(2, 6, 3)
    cache = HeadCache(head, 2)
    feature = head.fuse(params, hidden)
    output = extend(head, params, cache, NewRows([0, 1], feature, tokens, [6, 6]))[:, -1]
    rows = [[a_row(position=7 + k, sample_index=b, **more) for b in range(2)] for k in range(4)]
    chains = draft_chains(head, params, cache, ChainStart([0, 1], output, rows, [1]))
    assert set(chains.distributions) == {1}
    assert chains.tokens.shape == chains.confidences.shape == (2, 4)
    assert cache.lengths == [6, 6]
    for b in range(2):
        text = tokens[b].tolist()
        for k in range(4):
            padded = torch.cat((hidden[b], torch.zeros(k, *hidden.shape[2:])))
            last = drafted_outputs(head, params, (padded, torch.tensor(text)), 5, k + 1)[-1]
            drawn = draw(head.logits(params, last[None]), [rows[k][b]], head.frozen.vocabulary)
            assert int(drawn.tokens) == int(chains.tokens[b, k])
            if b in chains.distributions:
                probs = torch.from_numpy(chains.distributions[b][k].dense(V)).float()
                torch.testing.assert_close(probs[::2], drawn.probs[0], rtol=1e-4, atol=1e-6)
                assert probs[1::2].sum() == 0 and (probs > 0).sum() == (drawn.probs > 0).sum()
            text.append(int(drawn.tokens))
