"""Which drafter the engine's samples get, as `--speculate` names it."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.online_trainer import (
    OnlineSettings,
    OnlineTrainer,
    OnlineTrainers,
)
from tinkercloud.embedded.draft_training.trainees import head_trainee, model_trainee
from tinkercloud.embedded.drafting.draft_model import open_draft, tokenizer_pair
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.step_costs import round_costs
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import Speculate
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.trace import Trace
from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.controller import (
    ControllerSettings,
    DraftLengthController,
)
from tinkercloud.speculative.draft_length.planning import Estimates, PlannerSettings
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.drafter_table import DrafterFactory, drafter_table
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.learning.cases import CaseStore

logger = logging.getLogger(__name__)

AUTO = "suffix"


DRAFT_POOL_BYTES = 512 * 1024**2
MOST_READ, MOST_DRAWN = 16, 8  # tokens of a draft: each costs nothing to find, or a step
MOST_ROWS = 64
"""Of a pass, drafted ones included. Beyond, a CPU is bound by arithmetic: a drafted row costs what
a sample's own does, and the noise of a measured table must not promise otherwise."""


@dataclass(frozen=True, slots=True)
class Asked:
    """name: as `--speculate` has it. trace_to: a file, or None. cache_dir: for what is made of a
    draft model's files. drafts_dir: where draft heads are."""

    name: str
    trace_to: Path | None
    num_threads: int
    cache_dir: Path
    drafts_dir: Path
    following: OnlineSettings = field(default_factory=OnlineSettings)


def speculate(asked: Asked, loops: OnlineTrainers | None = None) -> Speculate | None:
    """None where it is off. loops: where the drafts' training goes; None: they are not trained."""
    if asked.name == "off":
        return None
    named = AUTO if asked.name == "auto" else asked.name
    trace = Trace(asked.trace_to) if asked.trace_to is not None else None

    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation | None:
        if not runner.is_exact and asked.name == "auto":
            return None  # several rows of a sample may differ from one in their last bits
        if not runner.is_exact:
            logger.warning("on this device drafts may change the last bits of log-probabilities")
        vocab_size = base.config.vocab_size
        makers: dict[str, DrafterFactory] = {
            "model": lambda path: _model_drafter(Path(path), base, runner, asked.cache_dir),
            "head": lambda name: _head_drafter(name or "best", base, runner, asked.drafts_dir),
        }
        drafter = drafter_table(vocab_size, makers).make(named)
        costs = round_costs(base, runner, pool, asked.num_threads)
        most = MOST_READ if isinstance(drafter, SuffixDrafter) else MOST_DRAWN
        known = Estimates(costs, acceptance=Acceptance(most))
        policy = DraftLengthController(known, ControllerSettings(PlannerSettings(most, MOST_ROWS)))
        loop = None
        if loops is not None:
            loop = _loop(drafter, base, asked)
            loops.add(base, loop)
        speculation = Speculation(GuardedDrafter(drafter, vocab_size), policy, trace, loop)
        if loop is not None:
            loop.speculation = speculation
        return speculation

    return make


def _loop(drafter: Drafter, base: BaseModel, asked: Asked) -> OnlineTrainer:
    """What trains the drafter: the one that is best, not one that was asked for by its name."""
    following = asked.following
    store = CaseStore(int(following.case_share * following.memory_bytes), following.max_age)
    folder = drafts_of(asked.drafts_dir, base.name)
    pupil = None
    if isinstance(drafter, HeadDrafter) and asked.name in ("head", "head:best"):
        pupil = head_trainee(drafter, following)
    elif isinstance(drafter, ModelDrafter):
        folder = drafts_of(asked.drafts_dir, f"{base.name}--{drafter.version.base.name}")
        pupil = model_trainee(drafter, drafter.version, store, folder)
    return OnlineTrainer(folder, store, pupil, following)


def _head_drafter(name: str, base: BaseModel, runner: Runner, drafts_dir: Path) -> HeadDrafter:
    head, params = open_head(drafts_of(drafts_dir, base.name), name, base)
    drafter = HeadDrafter(head, params)
    runner.capture(base, drafter.layers)
    return drafter


def _model_drafter(path: Path, base: BaseModel, runner: Runner, cache_dir: Path) -> Drafter:
    draft = open_draft(path, base, cache_dir)
    pair = tokenizer_pair(draft, base)
    num_blocks = max(
        DRAFT_POOL_BYTES // BlockPool.bytes_per_block(draft.config, draft.dtype),
        blocks_for(draft.config.max_position_embeddings),
    )
    pool = BlockPool(draft.config, draft.dtype, draft.device, num_blocks)
    version = Version(f"draft {path}", draft, draft.weights, None, 1.0)
    if pair is None:
        return ModelDrafter(version, runner, pool)
    logger.info("%s has other tokens than %s: it drafts through text", draft.name, base.name)
    return TextModelDrafter(version, runner, pool, pair)
