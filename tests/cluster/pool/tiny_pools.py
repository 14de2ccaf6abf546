"""Settings of a backend with two bases "a" and "b", whose ranks hold a model that can be checked by
hand and whose engines cannot start."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.cpu.tiny import PLAIN, SIZES
from tinkercloud.cluster.base_models import BaseModels
from tinkercloud.config import ClusterConfig, Config, ModelSource


def tiny_config(
    folder: Path, faults: Path, monkeypatch: pytest.MonkeyPatch, placement_timeout_s: float
) -> Config:
    """Two ranks for each pool, and room for one pool on two CPUs."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    for name in ("a", "b"):
        (folder / name).mkdir()
        config = {**SIZES, **llama, "rope_parameters": PLAIN}
        (folder / name / "config.json").write_text(json.dumps(config))
    plain = BaseModels.pool_settings

    def with_tiny_ranks(self: BaseModels, *args):
        made = plain(self, *args)
        environment = {"TINY_FAULTS": str(faults)}
        rank_class = "tests.cluster.ray_ranks:TinyRank"
        return replace(
            made, group=replace(made.group, rank_class=rank_class, environment=environment)
        )

    monkeypatch.setattr(BaseModels, "pool_settings", with_tiny_ranks)
    own = ClusterConfig(
        gpus=2, dp=2, tp=1, gpu_memory_bytes=16 * 1024**3, max_seq_len=128, device="cpu",
        sglang_command=f"{sys.executable} -c \"raise SystemExit('no engine here')\"",
        placement_timeout_s=placement_timeout_s, start_timeout_s=240.0, operation_timeout_s=120.0,
        sample_timeout_s=5.0,
    )  # fmt: skip
    models = tuple(ModelSource(name, folder / name) for name in ("a", "b"))
    return Config(data_dir=folder / "data", models=models, cluster=own)
