"""A worker's draft model drafts with what an engine's draft training learned."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tests.embedded.tiny import open_store
from tests.speculative.remote.test_remote_drafter import begun, stream, tokens_of
from tests.speculative.remote.workers import LocalLink
from tinkercloud.embedded.draft_training.files import model_drafts_of
from tinkercloud.embedded.drafting.draft_model import draft_pool
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.pushed_draft import PushedDraft
from tinkercloud.embedded.drafting.worker_drafters import WorkerDrafters
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.drafter_setup import (
    DrafterSettings,
    model_trainee,
    pushed_draft,
    require_drafts,
)
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.remote.learned_weights import LearnedWeights
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.speculative.remote.worker import DraftWorker
from tinkercloud.weights.adapters import adapter_of

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
PROMPT, MOST = [5, 9, 20, 31, 7, 80], 6
TARGET = Target("tiny", b"", 260)


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return open_store(folder).base("tiny")


def version(base: BaseModel) -> Version:
    return Version("draft", base, base.weights, None, 1.0)


def worker_drafters(base: BaseModel) -> WorkerDrafters:
    return WorkerDrafters(base, NativeRunner(1), pool_bytes=2**22)


def changed(params: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """As after a training, only farther."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in params.items()}


def test_workers_draft_with_what_was_learned(base: BaseModel, tmp_path: Path) -> None:
    drafters = worker_drafters(base)
    worker = DraftWorker(drafters, learn=drafters.learned)
    remote = RemoteDrafter([LocalLink(worker, target=TARGET)], 10.0, TARGET.vocab_size)
    other = RemoteDrafter([LocalLink(worker, "other", target=TARGET)], 10.0, TARGET.vocab_size)
    settings = DrafterSettings("remote:", None, 1, tmp_path, tmp_path)
    folder = model_drafts_of(tmp_path, "tiny", Path("draft"))
    pushed = PushedDraft(version(base), remote)
    trainee = model_trainee(pushed, settings, CaseStore(2**20, 8), folder)
    one, same = begun(remote, PROMPT), begun(other, PROMPT)
    before = tokens_of(remote, one, MOST)
    for seed in (0, 1):
        trainee.use(changed(trainee.trainer.params, seed))
        learned = pushed.version
        assert learned.adapter is not None
        local = ModelDrafter(learned, NativeRunner(1), draft_pool(base, NativeRunner(1), 2**22))
        one.tokens.append(40 + seed)
        local.begin(one)
        (expected,) = local.propose([(one, MOST)])
        assert tokens_of(remote, one, MOST) == expected.tokens
    assert tokens_of(other, same, MOST) == before, "another engine's drafts are as they were"


def test_the_workers_model_is_opened_at_the_server_too(
    base: BaseModel, folder: Path, tmp_path: Path
) -> None:
    pushed = pushed_draft(RemoteDrafter([], 0.1, TARGET.vocab_size), folder, base, tmp_path)
    assert pushed.version.adapter is None
    assert pushed.version.base.config == base.config
    settings = DrafterSettings(
        "remote:127.0.0.1:1", None, 1, tmp_path, tmp_path, remote_model=tmp_path / "absent"
    )
    with pytest.raises(ConfigError, match="no such file"):
        require_drafts(settings, [])


def test_a_draft_model_beside_the_target_drafts_with_what_it_learned_last(
    base: BaseModel, tmp_path: Path
) -> None:
    runner = NativeRunner(1)
    drafter = ModelDrafter(version(base), runner, draft_pool(base, runner, 2**22))
    settings = DrafterSettings("model", None, 1, tmp_path, tmp_path)
    folder = model_drafts_of(tmp_path, "tiny", Path("draft"))
    trainee = model_trainee(drafter, settings, CaseStore(2**20, 8), folder)
    one = stream(PROMPT)
    drafter.begin(one)
    for seed in (0, 1):
        trainee.use(changed(trainee.trainer.params, seed))
        anew = ModelDrafter(drafter.version, NativeRunner(1), draft_pool(base, runner, 2**22))
        anew.begin(one)
        (expected,) = anew.propose([(one, MOST)])
        (found,) = drafter.propose([(one, MOST)])
        assert found.tokens == expected.tokens


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("bytes", "cannot be read"),
        ("missing", "lora_B"),
        ("name", "is not as in"),
        ("shape", "is not as in"),
        ("nan", "not finite"),
        ("more", "no adapter"),
    ],
)
def test_weights_of_another_model_are_not_used(base: BaseModel, fault: str, reason: str) -> None:
    drafters = worker_drafters(base)
    name, (rows, columns) = next(iter(base.config.linear_shapes().items()))
    tensors = {f"{name}.lora_A": torch.ones(2, columns), f"{name}.lora_B": torch.ones(rows, 2)}
    assert adapter_of(tensors)
    if fault == "missing":
        del tensors[f"{name}.lora_B"]
    if fault == "name":
        tensors = {f"x.{n}": t for n, t in tensors.items()}
    if fault == "shape":
        tensors[f"{name}.lora_B"] = torch.ones(rows + 1, 2)
    if fault == "nan":
        tensors[f"{name}.lora_A"][0, 0] = torch.nan
    if fault == "more":
        tensors["stranger"] = torch.ones(1)
    content = b"\xff" * 20 if fault == "bytes" else save(tensors)
    drafter = drafters(TARGET)
    with pytest.raises(ConfigError, match=reason):
        drafters.learned(TARGET, drafter, LearnedWeights(content, 1.0))
