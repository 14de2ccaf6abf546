"""Which drafter the engine's samples get, as `--speculate` names it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.dataset import CaseDataset, Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import assign, copied
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.model_trainer import (
    DraftModelTrainer,
    ModelObjective,
    adapter_of,
)
from tinkercloud.embedded.draft_training.online_trainer import (
    DraftTrainee,
    OnlineSettings,
    OnlineTrainer,
    OnlineTrainers,
)
from tinkercloud.embedded.drafting.draft_model import open_draft, tokenizer_pair
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.step_costs import round_costs
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.base_states import Speculate
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.trace import Trace
from tinkercloud.errors import NotFound
from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.controller import (
    ControllerSettings,
    DraftLengthController,
)
from tinkercloud.speculative.draft_length.planning import Estimates, PlannerSettings
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.drafter_table import DrafterFactory, DrafterTable
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import DraftFolder

logger = logging.getLogger(__name__)

AUTO = "suffix"
MIX = Mix(batch_size=8, held_out_one_in=5, most_held_out=24, recent=4)
DRAFT_LORA = LoraSpec(rank=8, seed=0)
DRAFT_POOL_BYTES = 512 * 1024**2
MAX_LOOKED_UP, MAX_COMPUTED = 16, 8  # tokens of a draft: each costs nothing, or a step of a network
MAX_ROWS = 64
"""Of a pass, drafted ones included. Beyond, a CPU is bound by arithmetic: a drafted row costs as
much as a sample's next token, and the noise of a measured table must not promise otherwise."""


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """name: as `--speculate` has it. trace_file: for `Trace`, if any. cache_dir: for files derived
    from a draft model's. drafts_dir: the folder of draft heads. online: how drafts are trained."""

    name: str
    trace_file: Path | None
    num_threads: int
    cache_dir: Path
    drafts_dir: Path
    online: OnlineSettings = field(default_factory=OnlineSettings)


def speculate(
    settings: DrafterSettings, trainers: OnlineTrainers | None = None
) -> Speculate | None:
    """None where it is off. trainers: these train the drafts; None: they are not trained."""
    if settings.name == "off":
        return None
    name = AUTO if settings.name == "auto" else settings.name
    trace = Trace(settings.trace_file) if settings.trace_file is not None else None

    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation | None:
        if not runner.is_exact and settings.name == "auto":
            return None  # several rows of a sample may differ from one in their last bits
        if not runner.is_exact:
            logger.warning("on this device drafts may change the last bits of log-probabilities")
        vocab_size = base.config.vocab_size
        factories: dict[str, DrafterFactory] = {
            "model": lambda path: _model_drafter(Path(path), base, runner, settings.cache_dir),
            "head": lambda head: _head_drafter(head or "best", base, runner, settings.drafts_dir),
        }
        drafter = DrafterTable(factories).make(name)
        costs = round_costs(base, runner, pool, settings.num_threads)
        max_draft = MAX_LOOKED_UP if isinstance(drafter, SuffixDrafter) else MAX_COMPUTED
        estimates = Estimates(costs, acceptance=Acceptance(max_draft))
        planner = PlannerSettings(max_draft, MAX_ROWS)
        controller = DraftLengthController(estimates, ControllerSettings(planner))
        trainer = None
        if trainers is not None:
            trainer = _online_trainer(drafter, base, settings)
            trainers.add(base, trainer)
        speculation = Speculation(GuardedDrafter(drafter, vocab_size), controller, trace, trainer)
        if trainer is not None:
            trainer.speculation = speculation
        return speculation

    return make


def _online_trainer(drafter: Drafter, base: BaseModel, settings: DrafterSettings) -> OnlineTrainer:
    """Trains the drafter only where `best` is served, not a head that was chosen by name."""
    online = settings.online
    store = CaseStore(int(online.case_share * online.memory_bytes), online.max_age)
    folder = drafts_of(settings.drafts_dir, base.name)
    trainee = None
    if isinstance(drafter, HeadDrafter) and settings.name in ("head", "head:best"):
        trainee = head_trainee(drafter, online)
    elif isinstance(drafter, ModelDrafter):
        folder = drafts_of(settings.drafts_dir, f"{base.name}--{drafter.version.base.name}")
        trainee = model_trainee(drafter, store, folder)
    return OnlineTrainer(folder, store, trainee, online)


def head_trainee(drafter: HeadDrafter, online: OnlineSettings) -> DraftTrainee:
    """Learns from hidden states and distributions of the policy's own training passes."""
    dataset = SequenceDataset(online.memory_bytes, online.max_age, MIX)
    trainer = HeadTrainer(drafter.head, drafter.params, HeadObjective())
    return DraftTrainee(trainer, dataset, drafter.use, drafter.layers, dataset.add)


def model_trainee(drafter: ModelDrafter, store: CaseStore, folder: DraftFolder) -> DraftTrainee:
    """Learns an adapter from the cases in which draft and target disagreed; begins with the best
    one so far, if there is one."""
    draft = drafter.version
    trainer = DraftModelTrainer(draft.base, DRAFT_LORA, ModelObjective())

    def use(params: Mapping[str, Tensor]) -> None:
        scale = DRAFT_LORA.alpha / DRAFT_LORA.rank
        drafter.use(Version(draft.id, draft.base, draft.weights, adapter_of(params), scale))

    try:
        assign(trainer, trainer.read(folder.path("best")))
    except NotFound:
        pass
    else:
        use(copied(trainer.params))
    return DraftTrainee(trainer, CaseDataset(store, MIX), use)


def _head_drafter(name: str, base: BaseModel, runner: Runner, drafts_dir: Path) -> HeadDrafter:
    head, params = open_head(drafts_of(drafts_dir, base.name), name, base)
    drafter = HeadDrafter(head, params)
    runner.capture(base, drafter.layers)
    return drafter


def _model_drafter(path: Path, base: BaseModel, runner: Runner, cache_dir: Path) -> Drafter:
    draft = open_draft(path, base, cache_dir)
    pair = tokenizer_pair(draft, base)
    layout = runner.kv_layout(draft)
    num_blocks = max(
        DRAFT_POOL_BYTES // BlockPool.bytes_per_block(draft.config, draft.dtype, layout),
        blocks_for(draft.config.max_position_embeddings),
    )
    pool = BlockPool(draft.config, draft.dtype, draft.device, num_blocks, layout)
    version = Version(f"draft {path}", draft, draft.weights, None, 1.0)
    if pair is None:
        return ModelDrafter(version, runner, pool)
    logger.info("%s has other tokens than %s: it drafts through text", draft.name, base.name)
    return TextModelDrafter(version, runner, pool, pair)
