"""How far the trainer's log-probabilities are from the sampler's where both have the same weights.

On-policy the importance ratio is 1 by definition, so |ratio - 1| there is what the two passes
differ by. A token counts where a sampler of the model's present weights drew it at temperature 1
from the whole vocabulary, after exactly the datum's tokens before it, with exactly the
log-probability in the datum's `logprobs`. That is known without the client's help, whatever the
loss, and leaves out what was edited, and what older weights drew.

Axes: N tokens of a datum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.policy_metrics import is_trained
from tinkercloud.core.types import Datum, SampleOutput, SampleRequest, TrainBatch, TrainOutput

MAX_SEQUENCES = 2**16
"""Of a model's present weights that are remembered, 16 bytes each; later ones are not."""


@dataclass(slots=True)
class Deviation:
    """Over on-policy tokens. largest: of |ratio - 1|. total: of |difference|, in nats."""

    num_tokens: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, difference: NDArray[np.float64]) -> None:
        """difference (n,), n >= 1: the trainer's log-probabilities less the sampler's."""
        with np.errstate(over="ignore"):  # infinity is what such a ratio is
            largest = float(np.abs(np.expm1(difference)).max())
        self.num_tokens += len(difference)
        self.largest = max(self.largest, largest)
        self.total += float(np.abs(difference).sum())


@dataclass(slots=True)
class _Policy:
    """Of a model as it is now. sources: versions, and folders of checkpoints, with its weights.
    sequences: digests of what these drew. deviation: since the last optimizer step."""

    sources: set[str] = field(default_factory=set[str])
    sequences: set[bytes] = field(default_factory=set[bytes])
    deviation: Deviation = field(default_factory=Deviation)


class OnPolicyTracker:
    """In memory: the samplers of a model's present weights end with the process too."""

    def __init__(self) -> None:
        self._policies: dict[str, _Policy] = {}  # by model id
        self._model_of: dict[str, str] = {}  # by source
        self._since_start = Deviation()

    def published(self, model_id: str, source: str) -> None:
        """source: a version, or a checkpoint's folder; called before the weights change again."""
        self._policies.setdefault(model_id, _Policy()).sources.add(source)
        self._model_of[source] = model_id

    def loaded(self, folder: str, version: str) -> None:
        """The version has the weights of the checkpoint in the folder."""
        if (model_id := self._model_of.get(folder)) is not None:
            self.published(model_id, version)

    def drawn(self, version: str, request: SampleRequest, output: SampleOutput) -> None:
        model_id = self._model_of.get(version)
        if model_id is None or not _is_untouched(request):
            return
        sequences = self._policies[model_id].sequences
        for drawn in output.sequences:
            if len(sequences) < MAX_SEQUENCES:
                sequences.add(_digest(request.prompt, drawn.tokens, drawn.logprobs))

    def trained(self, model_id: str, batch: TrainBatch, output: TrainOutput) -> None:
        """Called in the model's lane: the output is of its present weights."""
        policy = self._policies.get(model_id)
        if policy is None or not policy.sequences:
            return
        for datum, fields in zip(batch.data, output.outputs, strict=True):
            for run in _runs(datum):
                if _digest_of(datum, run) in policy.sequences:
                    sampled = datum.inputs["logprobs"][run].astype(np.float64)
                    difference = fields["logprobs"][run].astype(np.float64) - sampled
                    policy.deviation.add(difference)
                    self._since_start.add(difference)

    def stepped(self, model_id: str) -> dict[str, float]:
        """Metrics of what was trained for this step; none where nothing is known. From now on the
        model has other weights."""
        policy = self._policies.get(model_id, _Policy())
        self.changed(model_id)
        if not policy.deviation.num_tokens:
            return {}
        return {
            "on_policy_ratio_deviation:max": policy.deviation.largest,
            "on_policy_tokens:sum": float(policy.deviation.num_tokens),
        }

    def changed(self, model_id: str) -> None:
        """The model has other weights, or is no more: nothing that was sampled is on-policy."""
        policy = self._policies.pop(model_id, _Policy())
        for source in policy.sources:
            self._model_of.pop(source, None)

    def stats(self) -> dict[str, float]:
        """Since the server's start, of all models. The mean is in nats."""
        totals = self._since_start
        return {
            "on_policy_tokens": totals.num_tokens,
            "on_policy_ratio_deviation_max": totals.largest,
            "on_policy_logprob_deviation_mean": totals.total / max(totals.num_tokens, 1),
        }


def _is_untouched(request: SampleRequest) -> bool:
    """Whether the log-probabilities are the model's own."""
    params = request.params
    limits = (params.temperature, params.top_k, params.top_p, params.min_p)
    return limits == (1, -1, 1, 0) and not params.has_penalties and request.grammar is None


def _runs(datum: Datum) -> Iterator[slice]:
    """Stretches of trained tokens, each of which may be one sampled sequence."""
    inputs: Mapping[str, NDArray[Any]] = datum.inputs
    if "advantages" not in inputs or "logprobs" not in inputs:
        return
    trained = is_trained(inputs)
    bounds = np.flatnonzero(np.diff(trained, prepend=False, append=False))
    for start, stop in bounds.reshape(-1, 2).tolist():
        yield slice(start, stop)


def _digest_of(datum: Datum, run: slice) -> bytes:
    inputs = datum.inputs
    prompt = datum.tokens[: run.start + 1]  # position i predicts target_tokens[i]
    return _digest(prompt, inputs["target_tokens"][run], inputs["logprobs"][run])


def _digest(prompt: NDArray[Any], tokens: NDArray[Any], logprobs: NDArray[Any]) -> bytes:
    digest = blake2b(len(prompt).to_bytes(8, "little"), digest_size=16)
    for array, dtype in ((prompt, "<i4"), (tokens, "<i4"), (logprobs, "<f4")):
        digest.update(array.astype(dtype).tobytes())
    return digest.digest()
