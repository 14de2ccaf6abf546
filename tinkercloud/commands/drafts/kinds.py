"""The two kinds of drafts that `tinkercloud draft` makes, with what each does by its own means:
heads of the model that is drafted for, and adapters of a smaller model.

Axes: N tokens of a text, M most probable tokens of the target.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tinkercloud.commands.drafts.collect import Text
from tinkercloud.commands.saved_weights import placed
from tinkercloud.config import Config
from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.capture import (
    CapturedSequence,
    SequenceMetadata,
    capture_sequence,
)
from tinkercloud.embedded.draft_training.files import drafts_of, model_drafts_of, open_head
from tinkercloud.embedded.draft_training.fit import Evaluation, Trainer, assign, joined
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.model_trainer import (
    CaseExample,
    DraftModelTrainer,
    ModelObjective,
)
from tinkercloud.embedded.draft_training.read_cases import read_cases
from tinkercloud.embedded.drafting.draft_model import open_draft, tokenizer_pair
from tinkercloud.embedded.drafting.head_drafter import head_drafter
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.drafter_setup import draft_lora, model_drafter
from tinkercloud.errors import ConfigError, NotFound, UserError
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.head.head import Head, initial_params
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.weights.adapter_folders import open_adapter
from tinkercloud.weights.adapters import flat_params, fresh_adapter
from tinkercloud.weights.peft_import import ImportedAdapter

HeadWeights = tuple[Head, dict[str, Tensor]]
"""A head and its parameters."""
Weights = TypeVar("Weights")
MODEL = "model"


class DraftKind(ABC, Generic[Weights]):
    """Of one target. folder: its versions."""

    folder: DraftFolder

    @abstractmethod
    def untrained(self) -> Weights:
        """As every training of this kind begins."""

    @abstractmethod
    def named(self, name: str) -> Weights:
        """Of a version or an alias. Raises ConfigError where there is none, or none that fits."""

    @abstractmethod
    def drafter(self, weights: Weights, runner: Runner) -> Drafter: ...

    @abstractmethod
    def trainer(self, weights: Weights) -> Trainer[Any]:
        """Raises UserError where this draft cannot be trained."""

    @abstractmethod
    def expected(self, version: Version, weights: Weights, texts: Sequence[Text]) -> Evaluation:
        """On texts that the target wrote."""


class HeadKind(DraftKind[HeadWeights]):
    def __init__(self, base: BaseModel, folder: DraftFolder):
        self._base, self.folder = base, folder

    def untrained(self) -> HeadWeights:
        head, _ = self.named("best")
        return head, initial_params(head.config, 0)

    def named(self, name: str) -> HeadWeights:
        return open_head(self.folder, name, self._base)

    def drafter(self, weights: HeadWeights, runner: Runner) -> Drafter:
        return head_drafter(weights, self._base, runner)

    def trainer(self, weights: HeadWeights) -> HeadTrainer:
        return HeadTrainer(*weights, HeadObjective())

    def expected(self, version: Version, weights: HeadWeights, texts: Sequence[Text]) -> Evaluation:
        trainer, layers = self.trainer(weights), weights[0].config.layers
        return joined(
            [trainer.evaluate([captured(version, t, layers)]) for t in texts if _is_read(t)]
        )


class ModelKind(DraftKind[ImportedAdapter]):
    """spec: of the adapter that a new draft learns."""

    def __init__(self, base: BaseModel, path: Path, config: Config, spec: LoraSpec):
        self._base, self._path, self.spec = base, path, spec
        self.draft = open_draft(path, base, config.data_dir / "cache")
        self.folder = model_drafts_of(config.data_dir / "drafts", base.name, path)

    def untrained(self) -> ImportedAdapter:
        shapes = self.draft.config.linear_shapes()
        return ImportedAdapter(self.spec, fresh_adapter(self.spec, shapes, self.draft.device))

    def named(self, name: str) -> ImportedAdapter:
        try:
            folder = self.folder.path(name)
        except NotFound as error:
            raise ConfigError(
                f"{self.draft.name} has learned nothing for {self._base.name} yet ({error}); "
                f"`tinkercloud draft train --speculate model:{self._path}` makes a draft"
            ) from None
        return self.read(folder)

    def read(self, folder: Path) -> ImportedAdapter:
        """PEFT's files or MLX-LM's."""
        adapter = open_adapter(folder, self._path)
        return replace(adapter, adapter=placed(adapter.adapter, self.draft))

    def drafter(self, weights: ImportedAdapter, runner: Runner) -> Drafter:
        drafter, spec = model_drafter(self.draft, self._base, runner), weights.spec
        version = drafter.version
        drafter.use(replace(version, adapter=weights.adapter, scale=spec.alpha / spec.rank))
        return drafter

    def trainer(self, weights: ImportedAdapter) -> DraftModelTrainer:
        if self._drafts_through_text:
            raise UserError(f"{self.draft.name} has other tokens than {self._base.name}: it drafts "
                            "through text, and is not trained")  # fmt: skip
        trainer = DraftModelTrainer(self.draft, weights.spec, ModelObjective())
        assign(trainer, flat_params(weights.adapter))
        return trainer

    def expected(
        self, version: Version, weights: ImportedAdapter, texts: Sequence[Text]
    ) -> Evaluation:
        if self._drafts_through_text:
            return joined([])
        trainer = self.trainer(weights)
        return joined([trainer.evaluate(cases_of(version, t)) for t in texts if _is_read(t)])

    @property
    def _drafts_through_text(self) -> bool:
        return tokenizer_pair(self.draft, self._base) is not None


def kind_of(config: Config, base: BaseModel) -> HeadKind | ModelKind:
    """As `--speculate` names it: heads, where it says nothing of drafts."""
    name, _, path = config.speculate.partition(":")
    if name != MODEL:
        return HeadKind(base, folder_of(config))
    return ModelKind(base, Path(path), config, draft_lora(config.draft.rank))


def folder_of(config: Config) -> DraftFolder:
    """Of the first model of the settings, and of the kind of draft that `--speculate` names."""
    model, drafts_dir = config.models[0].name, config.data_dir / "drafts"
    name, _, path = config.speculate.partition(":")
    if name == MODEL:
        return model_drafts_of(drafts_dir, model, Path(path))
    return drafts_of(drafts_dir, model)


def captured(version: Version, text: Text, layers: Sequence[int]) -> CapturedSequence:
    meta = SequenceMetadata(text.temperature, 0)
    return capture_sequence(version, text.tokens, layers, text.num_prompt, meta)


@torch.no_grad()
def cases_of(version: Version, text: Text) -> list[CaseExample]:
    """One for each token that the target wrote, with its distribution; nothing was drafted."""
    cases = read_cases(captured(version, text, (1,)), version.id)
    return [CaseExample(text.tokens[: case.position], case) for case in cases]


def _is_read(text: Text) -> bool:
    """Whether the target wrote enough of it."""
    return len(text.tokens) > text.num_prompt + 1
