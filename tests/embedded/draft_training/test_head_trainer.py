"""Training of heads on what the policy's passes compute; the policy stays as it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.decoding.rows import row_params
from tests.embedded.draft_training.toy_policy import (
    LENGTH,
    ROOM_BYTES,
    ToyPolicy,
    copy_of,
    filled,
    fitted,
    same_bits,
    same_gradients,
    tiny_version,
    trainer_of,
)
from tests.embedded.speculative_engine import untaught_head
from tests.embedded.tiny import random_prompt
from tests.speculative.head.head_scene import V, drafted_outputs
from tinkercloud.decoding.sampler import sample
from tinkercloud.embedded.draft_training.capture import (
    CapturedSequence,
    SequenceMetadata,
    capture_sequence,
)
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.fit import assign, copied, gradients, joined
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.draft import ChainStart, draft_chains
from tinkercloud.speculative.learning.cases import digest

# ---- heads


@pytest.mark.parametrize("measure", ["forward_kl", "reverse_kl", "lk"])
def test_a_head_learns_what_its_policy_will_say(measure):
    policy = ToyPolicy(0)
    trainer = trainer_of(policy.weights, HeadObjective(measure=measure))
    held = policy.sequences(8, 9000)
    before = trainer.evaluate(held)
    losses = fitted(trainer, filled(policy))
    after = trainer.evaluate(held)
    assert losses[-1] < 0.5 * losses[0]
    assert after.mean > 2 * before.mean
    assert all(a > b for a, b in zip(after.by_depth, before.by_depth, strict=True))


def test_a_head_unrolled_on_its_own_outputs_drafts_deeper_than_one_that_was_not(trained_head):
    policy, unrolled = trained_head
    other = trainer_of(policy.weights, HeadObjective(num_steps=1))
    fitted(other, filled(policy))
    judge = trainer_of(policy.weights)
    assign(judge, other.params)
    held = policy.sequences(8, 9000)
    assert unrolled.evaluate(held).by_depth[2] > judge.evaluate(held).by_depth[2] + 0.05


@pytest.mark.slow
def test_replay_keeps_the_acceptance_on_the_old_task():
    """The new task has nothing in common with the old one: for some steps it costs more than two
    points of acceptance there, which a fifth of replay then wins back."""
    low, high = ToyPolicy(0, range(30)), ToyPolicy(1, range(30, V))
    trainer_of_low = trainer_of(low.weights)
    fitted(trainer_of_low, filled(low, seed=1), 80)
    held = low.sequences(8, 9000)
    before = trainer_of_low.evaluate(held).by_depth[0]
    after = {}
    for share in (0.8, 1.0):
        trainer = copy_of(trainer_of_low, low)
        dataset = filled(low, share=share, batch_size=10)
        for sequence in high.sequences(48, 500, epoch=1):
            dataset.add(sequence)
        fitted(trainer, dataset, 150)
        after[share] = trainer.evaluate(held).by_depth[0]
        assert trainer.evaluate(high.sequences(8, 9500)).by_depth[0] > 0.5
    assert after[0.8] > before - 0.02
    assert after[1.0] < before - 0.2  # without it, the test would see the loss


def test_the_expected_accepted_length_is_that_of_drafting_from_every_place(trained_head):
    policy, trainer = trained_head
    (sequence,) = policy.sequences(1, 77)
    head, params = trainer._head, copied(trainer.params)
    hidden = torch.from_numpy(sequence.hidden[:-1])
    tokens = torch.from_numpy(sequence.tokens[1:]).long()
    slow = []
    for begin in range(len(tokens)):
        steps = min(3, len(tokens) - begin)
        survival, expected = 1.0, 0.0
        for step, output in enumerate(
            drafted_outputs(head, params, (hidden, tokens), begin, steps)
        ):
            at = begin + step + 1
            p = torch.from_numpy(sequence.top_probs[at])
            q = torch.softmax(head.logits(params, output), -1)[sequence.top_ids[at].tolist()]
            survival *= float(torch.minimum(p, q).sum())
            expected += survival
        slow.append(expected)
    per_row = trainer.evaluate([sequence]).per_row
    assert np.allclose(per_row, slow, atol=1e-4)


def accepted(trainer: HeadTrainer, policy: ToyPolicy, num_drafted: int = 3) -> float:
    """Accepted tokens of a draft, counted: drafted and verified with the same noise."""
    head, params = trainer._head, copied(trainer.params)
    texts = policy.sequences(150, 7000)
    slots = list(range(len(texts)))
    hidden = torch.stack([torch.from_numpy(t.hidden[:-1]) for t in texts])
    tokens = torch.stack([torch.from_numpy(t.tokens[1:]).long() for t in texts])
    cache = HeadCache(head, len(texts))
    new = NewRows(slots, head.fuse(params, hidden), tokens, [tokens.shape[1]] * len(texts))
    output = extend(head, params, cache, new)[:, -1]
    rows = [
        [row_params(seed=3, sample_index=b, position=LENGTH + k) for b in slots]
        for k in range(num_drafted)
    ]
    drafted = draft_chains(head, params, cache, ChainStart(slots, output, rows)).tokens
    last, survival, count = tokens[:, -1], torch.ones(len(texts), dtype=torch.bool), 0
    for k in range(num_drafted):
        last = sample(policy.logits[last], rows[k]).tokens
        survival &= drafted[:, k] == last
        count += int(survival.sum())
    return count / len(texts)


def test_more_drafted_tokens_of_a_trained_head_are_accepted_when_they_are_counted(trained_head):
    policy, trainer = trained_head
    fresh = accepted(trainer_of(policy.weights), policy)
    trained = accepted(trainer, policy)
    assert trained > fresh + 0.4
    # Coupled draws agree nearly as often as the distributions overlap, never more often.
    expected = trainer.evaluate(policy.sequences(150, 7000)).mean
    assert trained == pytest.approx(expected, rel=0.25)


def test_a_batch_is_the_sum_of_its_sequences(trained_head):
    policy, trainer = trained_head
    sequences = [policy.sequence(1), policy.sequence(2, temperature=0.7)]
    short = sequences[1]
    sequences[1] = CapturedSequence(
        short.tokens[:9], short.hidden[:9], short.top_ids[:9], short.top_probs[:9],
        short.weights[:9], short.temperature, short.epoch,
    )  # fmt: skip
    together = trainer.evaluate(sequences)
    apart = joined([trainer.evaluate([s]) for s in sequences])
    assert np.allclose(together.per_row, apart.per_row, atol=1e-5)


def test_the_parts_of_a_batch_have_its_gradient(trained_head):
    policy, trainer = trained_head
    sequences = [policy.sequence(1), policy.sequence(2, temperature=0.7), policy.sequence(3)]
    sequences[1] = sequences[1].window(0, 9)
    sequences[2].weights[:15] = 0.0  # a prompt, the others have another one
    parts = trainer.parts(sequences)
    assert [len(part) for part, _ in parts] == [1, 1, 1]
    same_gradients(trainer, sequences, parts)
    sequences[2].weights[:] = 0.0
    assert len(trainer.parts(sequences)) == 2
    same_gradients(trainer, sequences, trainer.parts(sequences))


# ---- the policy stays as it is


def test_no_gradient_reaches_the_policy(folder_of_tiny):
    """The policy's own loss and the head's, on one tape: the policy's gradient is bitwise the one
    it has without the head."""
    base = tiny_version(folder_of_tiny).base
    weights = dict(base.weights)
    for tensor in weights.values():
        tensor.requires_grad_()
    head, params = untaught_head(replace(base, weights=weights), range(0, 260, 2))
    trainer = HeadTrainer(head, params, HeadObjective())
    tokens = torch.tensor(random_prompt(12, 0))
    x = weights["model.embed_tokens"][tokens]
    hidden = torch.stack([x @ weights["model.layers.0.self_attn.o_proj"].T] * 2, 1)
    logits = x @ weights["lm_head"].T
    policy_loss = torch.logsumexp(logits, -1).sum()
    alone = torch.autograd.grad(
        policy_loss, list(weights.values()), allow_unused=True, retain_graph=True
    )
    captured = CapturedSequence.from_logits(
        tokens, hidden, logits, 1, SequenceMetadata(1.0, 0, top=16)
    )
    loss = trainer.loss([captured])
    both = torch.autograd.grad(policy_loss + loss, list(weights.values()), allow_unused=True)
    for a, b in zip(alone, both, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    _, grads = gradients(trainer, [captured])
    assert all(grads[n].abs().max() > 0 for n in grads)
    assert grads.keys() == trainer.params.keys()
    assert all(tensor.grad is None for tensor in weights.values())


def test_training_leaves_the_policys_weights_bitwise_unchanged(folder_of_tiny):
    version = tiny_version(folder_of_tiny)
    before = copied(version.base.weights)
    head, params = untaught_head(version.base, range(0, 260, 2))
    trainer = HeadTrainer(head, params, HeadObjective())
    dataset = SequenceDataset(ROOM_BYTES, 4, Mix(batch_size=4))
    for seed in range(12):
        tokens = np.array(random_prompt(20, seed), np.int32)
        dataset.add(
            capture_sequence(version, tokens, head.config.layers, 4, SequenceMetadata(1.0, 0))
        )
    losses = fitted(trainer, dataset, 15)
    assert losses[-1] < losses[0]
    assert same_bits(version.base.weights, before)


def test_a_captured_distribution_is_the_policys(folder_of_tiny):
    version = tiny_version(folder_of_tiny)
    tokens = np.array(random_prompt(9, 3), np.int32)
    captured = capture_sequence(version, tokens, (1, 2), 3, SequenceMetadata(0.7, 5, top=4))
    assert captured.hidden.shape == (9, 2, 48)
    assert captured.weights.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    logits = torch.from_numpy(captured.hidden[:, -1]) @ version.base.weights["lm_head"].T
    distribution = torch.softmax(logits / 0.7, -1)
    probs = distribution.gather(-1, torch.from_numpy(captured.top_ids).long())
    torch.testing.assert_close(probs, torch.from_numpy(captured.top_probs))


# ---- dataset


def test_held_out_sequences_are_never_trained_on_and_are_the_newest():
    policy = ToyPolicy(0)
    dataset = filled(policy)
    for sequence in policy.sequences(40, 300, epoch=2):
        dataset.add(sequence)
    held = {digest(s.tokens) for batch in dataset.held_out() for s in batch}
    assert held
    assert all(s.epoch == 2 for batch in dataset.held_out() for s in batch)
    drawn = [s for i in range(40) for s in dataset.batch(i)]
    assert not held & {digest(s.tokens) for s in drawn}
    assert sum(s.epoch == 2 for s in drawn) / len(drawn) == pytest.approx(0.8, abs=0.06)
    again = [s for i in range(40) for s in dataset.batch(i)]
    assert all(a is b for a, b in zip(drawn, again, strict=True))


def test_captured_sequences_stay_within_their_bytes_and_age():
    policy = ToyPolicy(0)
    size = policy.sequence(0).num_bytes
    dataset = SequenceDataset(16 * size, 2, Mix())
    for epoch in range(8):
        for sequence in policy.sequences(20, 100 * epoch, epoch):
            dataset.add(sequence)
        assert dataset.num_bytes <= 16 * size
    oldest = {s.epoch for i in range(30) for s in dataset.batch(i)}
    assert oldest <= {5, 6, 7}
