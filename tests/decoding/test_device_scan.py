"""The draw that stays on a device is the plain one: the same numbers, the same tokens."""

import numpy as np
import pytest
import torch

from tests.decoding.rows import row_params
from tinkercloud.decoding import device_scan, philox
from tinkercloud.decoding.device_scan import CANDIDATES, keep_masks, scan
from tinkercloud.decoding.sampler import RowParams, gumbel_noise, keep_mask, noise_of, sample

KEYS = [
    (0, 0, 0),
    (5, 3, 70),
    (2**64 - 1, 1023, 2**31),
    (2**63, 2, 1),
    (12345678901234567890, 7, 9),
]
CUTS = [(-1, 1.0), (3, 1.0), (-1, 0.7), (20, 0.5), (1, 1.0), (-1, 1e-9), (-1, 0.999999)]


def rows(count: int, temperature: float, top_k: int = -1, top_p: float = 1.0) -> list[RowParams]:
    return [
        row_params(temperature, (top_k, top_p), 2**64 - 1 - i, i % 5, 3 * i) for i in range(count)
    ]


def random_logits(count: int, size: int, spread: float = 4.0) -> torch.Tensor:
    return spread * torch.randn(count, size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("size", [1, 7, 8, 1001])
def test_random_numbers_are_numpys(size: int):
    flat = torch.tensor([[philox.signed(part) for part in key] for key in KEYS])
    found = philox.random_words(flat, size)
    for row, key in zip(found, KEYS, strict=True):
        assert torch.equal(noise_of(row.numpy().astype(np.uint32)), gumbel_noise(*key, size))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("spread", [0.0, 0.1, 4.0, 40.0])
def test_tokens_are_those_of_the_plain_draw(temperature: float, spread: float, dtype: torch.dtype):
    logits, asked = random_logits(40, 5003, spread).to(dtype), rows(40, temperature)
    plain, fast = sample(logits, asked), sample(logits, asked, scan)
    assert torch.equal(fast.tokens, plain.tokens)
    limit = 2e-5 + float(plain.norms.abs().max()) * 2**-23  # norms of the plain one are float32
    np.testing.assert_allclose(fast.logprobs, plain.logprobs, rtol=0, atol=limit)
    np.testing.assert_allclose(fast.distribution(3), plain.distribution(3), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_with_top_k_and_top_p_are_too(temperature: float, top_k: int, top_p: float):
    logits = random_logits(24, 700)
    asked = [*rows(12, temperature, top_k, top_p), *rows(12, 1.0)]
    plain, fast = sample(logits, asked), sample(logits, asked, scan)
    assert torch.equal(fast.tokens, plain.tokens)
    limit = 2e-5 + float(plain.norms.abs().max()) * 2**-23  # norms of the plain one are float32
    np.testing.assert_allclose(fast.logprobs, plain.logprobs, rtol=0, atol=limit)


def test_masks_of_many_rows_are_those_of_each():
    logits = random_logits(len(CUTS), 60)
    logits[:, 5] = logits[:, 9]
    kept = keep_masks(logits, [k for k, _ in CUTS], [p for _, p in CUTS])
    for row, (top_k, top_p) in enumerate(CUTS):
        assert torch.equal(kept[row], keep_mask(logits[row], top_k, top_p)), (top_k, top_p)


def test_equal_logits_go_to_the_lowest_id():
    logits = torch.zeros(2, 100)
    logits[0, 40], logits[0, 60] = 5.0, 5.0
    assert sample(logits, rows(2, 0.0), scan).tokens.tolist() == [40, 0]


def test_scores_nearer_than_the_margin_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch):
    """A device whose noise is a little off: the token is still the plain one."""
    logits, asked = random_logits(64, 4000), rows(64, 1.0)
    exact = device_scan._noise
    off = 2e-5 * torch.randn(64, 4000, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(device_scan, "_noise", lambda words: exact(words) + off)
    monkeypatch.setattr(device_scan, "MARGIN", 0.5)  # several candidates each
    assert scan(logits, asked).count.max() > 1
    assert torch.equal(sample(logits, asked, scan).tokens, sample(logits, asked).tokens)


def test_a_row_with_too_many_candidates_is_drawn_the_plain_way():
    logits = torch.zeros(2, 5000)
    logits[0] = 1e9  # so large that noise is lost in rounding
    asked = rows(2, 1.0)
    assert scan(logits, asked).count.tolist()[0] == -1
    assert torch.equal(sample(logits, asked, scan).tokens, sample(logits, asked).tokens)


def test_fewer_tokens_than_candidates_are_no_fault():
    logits, asked = random_logits(3, CANDIDATES - 5), rows(3, 1.0)
    assert torch.equal(sample(logits, asked, scan).tokens, sample(logits, asked).tokens)


def test_a_row_of_no_numbers_harms_no_other():
    logits, asked = random_logits(3, 500), rows(3, 1.0)
    expected = sample(logits, asked)
    logits[1] = float("nan")
    drawn = sample(logits, asked, scan)
    assert drawn.tokens[[0, 2]].tolist() == expected.tokens[[0, 2]].tolist()
    assert 0 <= int(drawn.tokens[1]) < 500
    assert torch.isnan(drawn.logprobs[1])


def test_no_row_of_logits_leaves_its_device(monkeypatch: pytest.MonkeyPatch):
    copied: list[int] = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda self: copied.append(self.numel()) or to_host(self)
    )
    sample(random_logits(8, 50_000), rows(8, 0.9, top_k=40), scan)
    assert copied
    assert sum(copied) < 8 * 100
