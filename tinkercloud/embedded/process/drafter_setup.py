"""Which drafter the engine's samples get, as `--speculate` names it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from tinkercloud.config import ModelSource
from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.dataset import CaseDataset, Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import NEW_RATE
from tinkercloud.embedded.draft_training.files import (
    drafts_of,
    has_trained,
    model_drafts_of,
    open_head,
    untrained_head,
)
from tinkercloud.embedded.draft_training.fit import assign, copied
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.model_trainer import DraftModelTrainer, ModelObjective
from tinkercloud.embedded.draft_training.online_trainer import (
    DraftTrainee,
    OnlineSettings,
    OnlineTrainer,
)
from tinkercloud.embedded.draft_training.online_trainers import OnlineTrainers
from tinkercloud.embedded.draft_training.read_cases import add_read
from tinkercloud.embedded.drafting.compiled_suffix import suffix_drafter
from tinkercloud.embedded.drafting.draft_model import draft_pool, open_draft, tokenizer_pair
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter, head_drafter
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.network_drafter import NetworkDrafter
from tinkercloud.embedded.drafting.step_costs import round_costs
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.base_states import Speculate
from tinkercloud.embedded.sampling.detailed_log import DetailedLog
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.speculation_pair import SpeculationPair
from tinkercloud.embedded.sampling.speculator import Speculator
from tinkercloud.embedded.sampling.trace import Trace
from tinkercloud.errors import ConfigError, NotFound, UserError
from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.controller import (
    ControllerSettings,
    DraftLengthController,
)
from tinkercloud.speculative.draft_length.costs import CostTable
from tinkercloud.speculative.draft_length.planning import Estimates, PlannerSettings
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.drafter_table import DrafterFactory, DrafterTable
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.weights.adapters import adapter_of
from tinkercloud.weights.tokenizer import vocabulary_digest

if TYPE_CHECKING:
    from tinkercloud.embedded.drafting.pushed_draft import PushedDraft
    from tinkercloud.speculative.remote.connection import ClientSecurity

logger = logging.getLogger(__name__)

AUTO, DETAILS = "suffix", "details.jsonl"
HEAD_BATCH, HEAD_WINDOW = 4, 48
"""Sequences of a step of training, and tokens of each: a step of half a second on two cores, so
that a tenth of the time is enough for a training every few steps of a small policy."""
DRAFT_POOL_BYTES = 512 * 1024**2
NEW_STEPS, NEW_CASES = 60, 8
"""Of a head that is made: steps of a training, and times as many tokens before one."""
MAX_LOOKED_UP = 24  # tokens of a draft that cost nothing
MAX_ROWS = 128
"""Of a pass, drafted ones included: up to where the times of rounds are measured, unless they are
long (`step_costs`)."""


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """name: as `--speculate` has it. trace_file: for `Trace`, if any; details_file: for
    `DetailedLog`, None for the one in the drafts' folder. cache_dir: for files derived
    from a draft model's. drafts_dir: the folder of draft heads. online: how drafts are trained;
    make_head, max_computed, replay_share, rank, remote_*: as `DraftConfig` has them."""

    name: str
    trace_file: Path | None
    num_threads: int
    cache_dir: Path
    drafts_dir: Path
    online: OnlineSettings = field(default_factory=OnlineSettings)
    make_head: bool = False
    max_computed: int = 8
    replay_share: float = 0.2
    rank: int = 8
    details_file: Path | None = None
    remote_wait_ms: float = 50.0
    remote_key_file: Path | None = None
    remote_ca_file: Path | None = None
    remote_model: Path | None = None

    @property
    def mix(self) -> Mix:
        return Mix(8, 1 - self.replay_share, held_out_one_in=5, most_held_out=24, recent=4)

    @property
    def lora(self) -> LoraSpec:
        return draft_lora(self.rank)


def draft_lora(rank: int) -> LoraSpec:
    """Of the adapter that a draft model learns. No unembedding: where the embeddings are tied to
    it other programs have no such module."""
    return LoraSpec(rank=rank, seed=0, train_unembed=False)


def require_drafts(settings: DrafterSettings, models: Sequence[ModelSource]) -> None:
    """Before anything is served: raises ConfigError where what is to draft is not there."""
    kind, _, name = settings.name.partition(":")
    if kind == "model" and not Path(name).exists():
        raise ConfigError(f"--speculate {settings.name}: there is no such file or folder")
    if kind == "remote":
        _remote_security(settings).check()
        if settings.remote_model is not None and not settings.remote_model.exists():
            raise ConfigError(f"{settings.remote_model}: there is no such file or folder")
    if kind != "head":
        return
    for model in models:
        folder = drafts_of(settings.drafts_dir, model.name)
        if folder.find(name) is not None if name else has_trained(folder):
            continue
        missing = f"draft head {name}" if name else "draft head"
        raise ConfigError(
            f"--speculate {settings.name}: {model.name} has no {missing}; `tinkercloud draft train "
            f"--model {model.name}={model.path} --data-dir {settings.drafts_dir.parent}` makes one "
            "in minutes, and --speculate auto does without"
        )


def speculate(
    settings: DrafterSettings, trainers: OnlineTrainers | None = None
) -> Speculate | None:
    """None where it is off. trainers: these train the drafts; None: they are not trained."""
    return None if settings.name == "off" else _SpeculatorFactory(settings, trainers)


class _SpeculatorFactory:
    """Called once for each base model. All of them share trace and log."""

    def __init__(self, settings: DrafterSettings, trainers: OnlineTrainers | None):
        self._settings = settings
        self._trainers = trainers
        self._trace = Trace(settings.trace_file) if settings.trace_file is not None else None
        self._details = DetailedLog(settings.details_file or settings.drafts_dir / DETAILS)

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> Speculator | None:
        settings, trainers = self._settings, self._trainers
        is_auto = settings.name == "auto"
        if not runner.is_exact:
            if is_auto:
                return None  # several rows of a sample may differ from one in their last bits
            logger.warning("on this device drafts may change the last bits of log-probabilities")
        drafter = self._drafter(base, runner)
        costs = round_costs(base, runner, pool, settings.num_threads)
        if is_auto and settings.make_head and trainers is not None:
            head, head_trainer, was_trained = _made_head(base, runner, settings)
            trainers.add(base, head_trainer)
            first = self._speculation(base, drafter, costs, None)
            # Each draft's controller corrects costs of its own.
            head_costs = CostTable.from_json(costs.to_json())
            second = self._speculation(base, head, head_costs, head_trainer)
            return SpeculationPair(first, second, lambda: was_trained or head_trainer.has_promoted)
        trainer = None
        if trainers is not None:
            trainer = _online_trainer(drafter, base, settings)
            trainers.add(base, trainer)
        return self._speculation(base, drafter, costs, trainer)

    def _drafter(self, base: BaseModel, runner: Runner) -> Drafter:
        settings = self._settings
        factories: dict[str, DrafterFactory] = {
            "suffix": lambda _: suffix_drafter(base),
            "model": lambda path: model_drafter(
                open_draft(Path(path), base, settings.cache_dir), base, runner
            ),
            "head": lambda name: head_drafter(
                open_head(drafts_of(settings.drafts_dir, base.name), name or "best", base),
                base,
                runner,
            ),
            "remote": lambda addresses: remote_drafter(addresses, base, settings),
        }
        return DrafterTable(factories).make(AUTO if settings.name == "auto" else settings.name)

    def _speculation(
        self, base: BaseModel, drafter: Drafter, costs: CostTable, trainer: OnlineTrainer | None
    ) -> Speculation:
        guard = GuardedDrafter(drafter, base.config.vocab_size)
        most = None if isinstance(drafter, SuffixDrafter) else self._settings.max_computed
        controller = _controller(costs, most)
        speculation = Speculation(guard, controller, self._trace, trainer, self._details)
        if trainer is not None:
            trainer.speculation = speculation
        return speculation


def remote_drafter(addresses: str, base: BaseModel, settings: DrafterSettings) -> Drafter:
    """addresses: "HOST:PORT,HOST:PORT". Raises ConfigError."""
    # Here: gRPC is loaded for those who use it, not at every start.
    from tinkercloud.addresses import parse_addresses
    from tinkercloud.speculative.remote.link import GrpcLink
    from tinkercloud.speculative.remote.messages import Target
    from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter

    digest = sha256(f"{base.name} {base.config}".encode()).digest()
    target = Target(base.name, digest, base.config.vocab_size)
    if base.decoder is not None:
        vocabulary = vocabulary_digest(base.decoder)
        target = replace(target, vocabulary_digest=vocabulary, tokenizer=base.decoder.to_str())
    security = _remote_security(settings)
    links = [GrpcLink(each, security, target) for each in parse_addresses(addresses)]
    return RemoteDrafter(links, settings.remote_wait_ms / 1e3, target.vocab_size)


def _remote_security(settings: DrafterSettings) -> "ClientSecurity":
    from tinkercloud.speculative.remote.connection import ClientSecurity

    return ClientSecurity(settings.remote_key_file, settings.remote_ca_file)


def _online_trainer(drafter: Drafter, base: BaseModel, settings: DrafterSettings) -> OnlineTrainer:
    """Trains the drafter only where `best` is served, not a head that was chosen by name."""
    online = settings.online
    store = _case_store(online)
    folder = drafts_of(settings.drafts_dir, base.name)
    trainee = None
    if isinstance(drafter, HeadDrafter) and settings.name in ("head", "head:best"):
        trainee = head_trainee(drafter, settings)
    elif isinstance(drafter, ModelDrafter):
        path = Path(settings.name.partition(":")[2])
        folder = model_drafts_of(settings.drafts_dir, base.name, path)
        trainee = model_trainee(drafter, settings, store, folder)
    elif settings.remote_model is not None and drafter.name == "remote":
        folder = model_drafts_of(settings.drafts_dir, base.name, settings.remote_model)
        pushed = pushed_draft(drafter, settings.remote_model, base, settings.cache_dir)
        trainee = model_trainee(pushed, settings, store, folder)
    return OnlineTrainer(folder, store, trainee, online)


def _made_head(
    base: BaseModel, runner: Runner, settings: DrafterSettings
) -> tuple[HeadDrafter, OnlineTrainer, bool]:
    """The best head, or one that knows nothing yet, with its trainer; whether it was trained. The
    first training is a longer one, of more text."""
    folder, online = drafts_of(settings.drafts_dir, base.name), settings.online
    was_trained = has_trained(folder)
    if was_trained:
        weights = open_head(folder, "best", base)
    else:
        weights = untrained_head(base)
        training, plan = online.training, online.training.plan
        plan = replace(plan, num_steps=NEW_STEPS, peak_rate=NEW_RATE * plan.peak_rate)
        trigger = replace(training.trigger, least_cases=NEW_CASES * training.trigger.least_cases)
        online = replace(online, training=replace(training, plan=plan, trigger=trigger))
    drafter = head_drafter(weights, base, runner)
    trainee = head_trainee(drafter, settings)
    return drafter, OnlineTrainer(folder, _case_store(online), trainee, online), was_trained


def _case_store(online: OnlineSettings) -> CaseStore:
    return CaseStore(int(online.case_share * online.memory_bytes), online.max_age)


def _controller(costs: CostTable, max_computed: int | None) -> DraftLengthController:
    """max_computed: tokens of a draft; None: of a drafter that looks them up. What these cost is
    known to be next to nothing, so there is no warm-up."""
    most = MAX_LOOKED_UP if max_computed is None else max_computed
    settings = ControllerSettings(PlannerSettings(most, MAX_ROWS))
    if max_computed is None:
        settings = replace(settings, warm_up=())
    return DraftLengthController(Estimates(costs, acceptance=Acceptance(most)), settings)


def head_trainee(drafter: HeadDrafter, settings: DrafterSettings) -> DraftTrainee:
    """Learns from hidden states and distributions of the policy's own training passes."""
    online = settings.online
    mix = replace(settings.mix, batch_size=HEAD_BATCH, window=HEAD_WINDOW)
    dataset = SequenceDataset(online.memory_bytes, online.max_age, mix)
    trainer = HeadTrainer(drafter.head, drafter.params, HeadObjective())
    return DraftTrainee(trainer, dataset, drafter.use, drafter.layers, dataset.add)


class LearningDraft(Protocol):
    """version: what it drafts with; `use` replaces it."""

    version: Version

    def use(self, version: Version) -> None: ...


def pushed_draft(drafter: Drafter, path: Path, base: BaseModel, cache_dir: Path) -> "PushedDraft":
    """The draft model of a remote drafter's workers. Raises ConfigError where it cannot learn."""
    from tinkercloud.embedded.drafting.pushed_draft import PushedDraft
    from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter

    assert isinstance(drafter, RemoteDrafter)
    draft = open_draft(path, base, cache_dir)
    if tokenizer_pair(draft, base) is not None:
        raise ConfigError(
            f"{draft.name} has other tokens than {base.name}, so that it cannot learn"
        )
    return PushedDraft(Version(draft.name, draft, draft.weights, None, 1.0), drafter)


def model_trainee(
    drafter: LearningDraft, settings: DrafterSettings, store: CaseStore, folder: DraftFolder
) -> DraftTrainee:
    """Learns an adapter from the cases in which draft and target disagreed; begins with the best
    one so far, if there is one."""
    draft, spec = drafter.version, settings.lora
    trainer = DraftModelTrainer(draft.base, spec, ModelObjective())
    numbers = count(1)

    def use(params: Mapping[str, Tensor]) -> None:
        scale = spec.alpha / spec.rank
        name = f"{draft.id} {next(numbers)}"  # runners keep what they made of a version by its id
        drafter.use(Version(name, draft.base, draft.weights, adapter_of(params), scale))

    try:
        assign(trainer, trainer.read(folder.path("best")))
    except NotFound:
        pass
    except UserError as error:  # of another rank, for one: it learns from the beginning
        logger.warning("%s; the draft model begins without what it had learned", error)
    else:
        use(copied(trainer.params))
    return DraftTrainee(
        trainer, CaseDataset(store, settings.mix), use, add=partial(add_read, store)
    )


def model_drafter(draft: BaseModel, base: BaseModel, runner: Runner) -> NetworkDrafter:
    """draft: as `open_draft` gives it, without an adapter."""
    pair = tokenizer_pair(draft, base)
    pool = draft_pool(draft, runner, DRAFT_POOL_BYTES)
    version = Version(draft.name, draft, draft.weights, None, 1.0)
    if pair is None:
        return ModelDrafter(version, runner, pool)
    logger.info("%s has other tokens than %s: it drafts through text", draft.name, base.name)
    return TextModelDrafter(version, runner, pool, pair)
