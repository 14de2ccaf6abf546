"""A real model, SmolLM2-135M, trained on two pipeline stages as the embedded backend trains it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cluster.rank_plans import tiny_plan
from tests.cluster.rank_scripts import Embedded, Job, Op, assert_same_output, data_for, lora, play
from tinkercloud.core.types import AdamParams
from tinkercloud.weights.huggingface import ensure_hf_folder


@pytest.mark.slow
def test_smollm2_on_two_stages_has_the_embedded_backends_losses(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    folder = ensure_hf_folder(smollm2_gguf, tmp_path / "cache")
    # The step is large beside the rounding of gradients: every loss after it depends on it.
    step = AdamParams(1e-3, eps=1e-2)
    script: list[Op] = [
        ("create", "m", lora(rank=8)),
        ("fb", "m", data_for("cross_entropy", [12, 31, 1], 1)),
        ("step", "m", step),
        ("fb", "m", data_for("ppo", [20, 5], 2)),
        ("fb", "m", data_for("cross_entropy", [9], 3)),
        ("step", "m", step),
        ("forward", "m", data_for("cross_entropy", [12, 31, 1], 1)),
    ]
    plan = tiny_plan(folder, lora_rank=8, pp=2)
    ours = play({"only": Job(plan, folder, script)})["only"]
    torch.set_num_threads(1)
    theirs = Embedded(folder, tmp_path / "versions").play(script)
    for op, own, expected in zip(script, ours, theirs, strict=True):
        if op[0] in ("fb", "forward"):
            assert_same_output(own, expected, rtol=5e-5)  # logits are about 20
        elif op[0] == "step":
            for name, value in expected.items():
                np.testing.assert_allclose(own[name], value, rtol=1e-4)
    first, last = ours[1].outputs[1]["logprobs"], ours[-1].outputs[1]["logprobs"]
    assert np.abs(first - last).mean() > 1e-2, "the steps moved the model"
