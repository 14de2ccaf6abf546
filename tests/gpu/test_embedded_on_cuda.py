"""The embedded backend computes on a GPU what it computes on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cluster.cpu.tiny import write_model
from tests.gpu import bodies


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_training_on_a_gpu_equals_training_on_a_cpu(kind: str, tmp_path: Path):
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = write_model(kind, tmp_path / "model")
    losses, logprobs, later = bodies.embedded(folder, "cuda")
    expected_losses, expected_logprobs, expected_later = bodies.embedded(folder, "cpu")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    np.testing.assert_allclose(later, expected_later, rtol=1e-3)
