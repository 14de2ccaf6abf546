"""What the tests of ranks share: tiny models, plans by name, and how results are compared."""

import json
from pathlib import Path

import torch

from tests.cluster.cpu.tiny import write_model
from tests.cluster.rank_plans import tiny_plan
from tests.cluster.rank_scripts import Job, Op, data_for, tensors
from tinkercloud.core.types import AdamParams

# Large eps: Adam divides by the gradient's size, and where that is nothing but the rounding of
# sums, two right answers would differ.
STEP = AdamParams(2e-2, eps=1.0)
DECAY = AdamParams(1e-2, beta1=0.5, beta2=0.7, eps=1.0, weight_decay=0.3)
CLIP = AdamParams(1e-2, eps=1.0, weight_decay=0.1, grad_clip_norm=0.5)

KINDS = ("llama", "llama_tied", "qwen3", "qwen3_moe")
TWO: dict[str, tuple[str, dict[str, int]]] = {
    "tp2": ("llama", {"tp": 2}),
    "tp2 plain": ("llama", {"tp": 2, "sequence_parallel": 0}),
    "dp2": ("llama", {"dp": 2}),
    "pp2": ("qwen3", {"pp": 2}),
    "cp2": ("qwen3", {"cp": 2}),
    "tied pp2": ("llama_tied", {"pp": 2}),
    "tied tp2": ("llama_tied", {"tp": 2}),
    "ep2": ("qwen3_moe", {"ep": 2, "dp": 2}),
    "recompute pp2": ("llama", {"pp": 2, "recompute": 1}),
}
FOUR: dict[str, tuple[str, dict[str, int]]] = {
    "tp2 pp2": ("qwen3", {"tp": 2, "pp": 2}),
    "tp2 dp2": ("llama", {"tp": 2, "dp": 2}),
    "cp2 dp2": ("qwen3", {"cp": 2, "dp": 2}),
    "tp2 cp2": ("llama", {"tp": 2, "cp": 2}),
    "ep2 tp2": ("qwen3_moe", {"tp": 2, "ep": 2, "dp": 2}),
    "ep2 etp2": ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 2, "dp": 2}),
    "ep2 pp2": ("qwen3_moe", {"pp": 2, "ep": 2, "dp": 2}),
}
PLANS = TWO | FOUR
GOOD, MORE = data_for("cross_entropy", [5, 17, 1, 40], 11), data_for("ppo", [9, 30, 21], 12)


class Scene:
    """Folders of models, and where jobs write."""

    def __init__(self, root: Path):
        self.root = root
        self.folders = {kind: root / kind for kind in KINDS}
        for kind, folder in self.folders.items():
            write_model(kind, folder, num_hidden_layers=2)

    def scratch(self, *names: object) -> Path:
        folder = self.root / "out" / " ".join(str(name) for name in names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def job(
        self,
        plan: str,
        script: list[Op],
        *,
        full: bool = False,
        resident: int = 4,
        dtype: str = "float32",
    ) -> Job:
        kind, sizes = PLANS[plan]
        rank = None if full else 8
        experts = 4 if kind == "qwen3_moe" and not full else None
        made = tiny_plan(
            self.folders[kind], lora_rank=rank, expert_lora_rank=experts, dtype=dtype, **sizes
        )
        return Job(made, self.folders[kind], script, resident)


def assert_equal(one: Path, other: Path) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    states = [json.loads((f / "training_state.json").read_text()) for f in (one, other)]
    assert states[0] == states[1]
