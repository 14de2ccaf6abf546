"""Training a small language model to draft for a larger one: LoRA on the cases they disagreed on.

Axes: T packed tokens, D hidden, M most probable tokens of the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.fit import Evaluation
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.losses import (
    MEASURES,
    Teacher,
    distances,
    expected_acceptance,
    weighted_mean,
)
from tinkercloud.speculative.learning.cases import Case, Tokens
from tinkercloud.weights.adapters import Adapter, fresh_adapter, load_adapter, save_adapter


@dataclass(frozen=True, slots=True, eq=False)
class CaseExample:
    """A case with the tokens before it, (position,)."""

    tokens: Tokens
    case: Case


@dataclass(frozen=True, slots=True)
class ModelObjective:
    """measure: a key of MEASURES. disagreed_weight: what a disagreement counts beside an agreed
    case."""

    measure: str = "lk"
    disagreed_weight: float = 3.0


class DraftModelTrainer:
    """The draft's base is frozen and shared; the adapter is the trainer's."""

    def __init__(self, base: BaseModel, spec: LoraSpec, training: ModelObjective):
        self._base, self._spec, self._training = base, spec, training
        adapter = fresh_adapter(spec, base.config.linear_shapes(), base.device)
        self._params = {n: t.requires_grad_() for n, t in _flat(adapter).items()}

    @property
    def params(self) -> dict[str, Tensor]:
        return self._params

    @property
    def adapter(self) -> Adapter:
        """The trained tensors themselves, as the engine's passes take them."""
        return _paired(self._params)

    @staticmethod
    def adapter_of(params: Mapping[str, Tensor]) -> Adapter:
        """Of what `params` or `read` gave."""
        return _paired(params)

    def loss(self, batch: Sequence[CaseExample]) -> Tensor:
        logits = self._logits(batch)
        teacher, temperature = _teacher(batch, logits.device)
        rows = distances(logits, teacher, temperature, MEASURES[self._training.measure])
        heavy = self._training.disagreed_weight
        weights = torch.tensor([1.0 if each.case.agreed else heavy for each in batch])
        return weighted_mean(rows, weights.to(rows.device))

    @torch.no_grad()
    def evaluate(self, batch: Sequence[CaseExample]) -> Evaluation:
        logits = self._logits(batch)
        teacher, temperature = _teacher(batch, logits.device)
        alpha = expected_acceptance(logits, teacher, temperature).double()
        return Evaluation(alpha.cpu().numpy(), (float(alpha.mean()),))

    def write(self, params: Mapping[str, Tensor], directory: Path) -> None:
        save_adapter(_paired(params), self._spec, self._base.name, directory)

    def read(self, directory: Path) -> dict[str, Tensor]:
        shapes = self._base.config.linear_shapes()
        try:
            return _flat(load_adapter(directory, self._spec, shapes, self._base.device))
        except (SafetensorError, OSError) as error:
            raise UserError(f"the draft in {directory} cannot be read: {error}") from None

    def _logits(self, batch: Sequence[CaseExample]) -> Tensor:
        """(cases, V), in the order of the batch; a context is computed once for all its cases."""
        longest: dict[str, Tokens] = {}
        for each in batch:
            known = longest.get(each.case.context)
            if known is None or len(known) < len(each.tokens):
                longest[each.case.context] = each.tokens
        begins = dict(zip(longest, _offsets([len(t) for t in longest.values()]), strict=True))
        hidden = self._hidden(list(longest.values()))
        wanted = [begins[each.case.context] + each.case.position - 1 for each in batch]
        context = self._context([])
        return self._base.architecture.unembed(context, hidden[wanted]).float()

    def _hidden(self, texts: list[Tokens]) -> Tensor:
        lengths = [len(text) for text in texts]
        tokens = self._base.tensor(np.concatenate(texts).astype(np.int64))
        positions = self._base.tensor(np.concatenate([np.arange(n) for n in lengths]))
        return self._base.architecture.hidden(self._context(lengths), tokens, positions)

    def _context(self, lengths: list[int]) -> TrainContext:
        scale = self._spec.alpha / self._spec.rank
        return TrainContext(self._base.weights, lengths, adapter=self.adapter, scale=scale)


def _teacher(batch: Sequence[CaseExample], device: torch.device) -> tuple[Teacher, Tensor]:
    """Cases may tell different numbers of tokens; shorter ones are filled with "none"."""
    most = max(len(each.case.top_ids) for each in batch)
    ids = np.full((len(batch), most), -1, np.int64)
    probs = np.zeros((len(batch), most), np.float32)
    for i, each in enumerate(batch):
        count = len(each.case.top_ids)
        ids[i, :count], probs[i, :count] = each.case.top_ids, each.case.top_probs
    rest = torch.tensor([each.case.rest for each in batch], device=device)
    temperature = torch.tensor([each.case.temperature for each in batch], device=device)
    told = torch.from_numpy(probs).to(device), torch.from_numpy(ids).to(device)
    return Teacher(*told, rest), temperature


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [int(end) - n for end, n in zip(np.cumsum(lengths), lengths, strict=True)]


def _flat(adapter: Adapter) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {}
    for name, (a, b) in adapter.items():
        params |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
    return params


def _paired(params: Mapping[str, Tensor]) -> Adapter:
    names = [n.removesuffix(".lora_A") for n in params if n.endswith(".lora_A")]
    return {n: (params[f"{n}.lora_A"], params[f"{n}.lora_B"]) for n in names}
