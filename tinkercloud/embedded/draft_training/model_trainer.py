"""Training of a small language model that drafts for a larger one: LoRA on the cases in which they
disagreed.

Axes: T packed tokens, D hidden, M most probable tokens of the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.fit import Evaluation
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.embedded.training.packed_context import frozen_context
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.losses import (
    MEASURES,
    Teacher,
    distances,
    expected_acceptance,
    weighted_mean,
)
from tinkercloud.speculative.learning.cases import Case, Tokens
from tinkercloud.weights.adapters import (
    adapter_of,
    flat_params,
    fresh_adapter,
    load_adapter,
    save_adapter,
)


@dataclass(frozen=True, slots=True, eq=False)
class CaseExample:
    """A case with the tokens before it, (position,)."""

    tokens: Tokens
    case: Case


@dataclass(frozen=True, slots=True)
class ModelObjective:
    """measure: a key of MEASURES. disagreed_weight: what a disagreement counts relative to an
    agreed case."""

    measure: str = "lk"
    disagreed_weight: float = 3.0


class DraftModelTrainer:
    """The draft's base is frozen and shared; the adapter is the trainer's."""

    def __init__(self, base: BaseModel, spec: LoraSpec, objective: ModelObjective):
        self._base, self._spec, self._objective = base, spec, objective
        adapter = fresh_adapter(spec, base.config.linear_shapes(), base.device)
        self._params = {n: t.requires_grad_() for n, t in flat_params(adapter).items()}

    @property
    def params(self) -> dict[str, Tensor]:
        return self._params

    def loss(self, batch: Sequence[CaseExample]) -> Tensor:
        logits = self._logits(batch)
        teacher, temperature = _teacher(batch, logits.device)
        rows = distances(logits, teacher, temperature, MEASURES[self._objective.measure])
        weights = torch.tensor([self._weight(example) for example in batch])
        return weighted_mean(rows, weights.to(rows.device))

    def parts(self, batch: Sequence[CaseExample]) -> Sequence[tuple[Sequence[CaseExample], float]]:
        """Context by context, each of which is computed once."""
        by_context: dict[str, list[CaseExample]] = {}
        for example in batch:
            by_context.setdefault(example.case.context, []).append(example)
        total = sum(map(self._weight, batch))
        return [(part, sum(map(self._weight, part)) / total) for part in by_context.values()]

    def _weight(self, example: CaseExample) -> float:
        return 1.0 if example.case.agreed else self._objective.disagreed_weight

    @torch.no_grad()
    def evaluate(self, batch: Sequence[CaseExample]) -> Evaluation:
        logits = self._logits(batch)
        alpha = expected_acceptance(logits, *_teacher(batch, logits.device)).double()
        return Evaluation(alpha.cpu().numpy(), (float(alpha.mean()),))

    def write(self, params: Mapping[str, Tensor], directory: Path) -> None:
        save_adapter(adapter_of(params), self._spec, self._base.name, directory)

    def read(self, directory: Path) -> dict[str, Tensor]:
        shapes = self._base.config.linear_shapes()
        try:
            return flat_params(load_adapter(directory, self._spec, shapes, self._base.device))
        except UserError as error:
            raise UserError(f"the draft in {directory} cannot be read: {error}") from None

    def _logits(self, batch: Sequence[CaseExample]) -> Tensor:
        """(cases, V), in the order of the batch; a context is computed once for all its cases."""
        contexts: dict[str, Tokens] = {}  # the longest prefix that is needed of each
        for example in batch:
            prefix = contexts.get(example.case.context)
            if prefix is None or len(prefix) < len(example.tokens):
                contexts[example.case.context] = example.tokens
        lengths = [len(tokens) for tokens in contexts.values()]
        offsets = dict(zip(contexts, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))
        rows = [offsets[each.case.context] + each.case.position - 1 for each in batch]
        hidden = self._hidden(list(contexts.values()), lengths)
        return self._base.architecture.unembed(self._context([]), hidden[rows]).float()

    def _hidden(self, texts: list[Tokens], lengths: list[int]) -> Tensor:
        tokens = self._base.tensor(np.concatenate(texts).astype(np.int64))
        positions = self._base.tensor(np.concatenate([np.arange(n) for n in lengths]))
        return self._base.architecture.hidden(self._context(lengths), tokens, positions)

    def _context(self, lengths: list[int]) -> TrainContext:
        adapter, scale = adapter_of(self._params), self._spec.alpha / self._spec.rank
        return frozen_context(self._base.weights, lengths, (adapter, scale))


def _teacher(batch: Sequence[CaseExample], device: torch.device) -> tuple[Teacher, Tensor]:
    """Of each case, and its temperature. Cases have different numbers of tokens; -1 is none."""
    cases = [example.case for example in batch]
    ids = [torch.from_numpy(case.top_ids.astype(np.int64)) for case in cases]
    probs = [torch.from_numpy(case.top_probs) for case in cases]
    rest = torch.tensor([case.rest for case in cases], device=device)
    temperature = torch.tensor([case.temperature for case in cases], device=device)
    padded_ids = pad_sequence(ids, batch_first=True, padding_value=-1).to(device)
    return Teacher(pad_sequence(probs, batch_first=True).to(device), padded_ids, rest), temperature
