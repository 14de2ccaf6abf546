"""Receipts: what a sample or a step was computed from and what it gave, for others to check.

A receipt is JSON. It names the base model and the weights by their hashes, says all that was asked
for, with seeds, and holds the result. It is made by computing the result again, here and now: what
does not come out the same has no receipt.
"""

import base64
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_gmi.types import SampleRequest
from tinkercloud.backends.base import Backend
from tinkercloud.core.types import FromBase, FromCheckpoint, FromModel, SampleOutput
from tinkercloud.errors import UserError
from tinkercloud.fingerprints import tensors_sha256
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.recovery.lane_operations import LOAD
from tinkercloud.services.runs.kept_runs import KeptRun, KeptRuns
from tinkercloud.services.runs.replay import Repeated, RunReplay
from tinkercloud.storage.futures import Sampled
from tinkercloud.storage.journal import RanOperation
from tinkercloud.storage.metadata import Sampler
from tinkercloud.wire.codec import decode_sample_output

FORMAT = 1
SAMPLE, STEP = "sample", "step"
# Of a request for samples: what its result depends on.
ASKED = {
    *("prompt", "num_samples", "sampling_params", "prompt_logprobs", "prompt_logprobs_last_n"),
    *("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs"),
    "prompt_alt_tokens_k",
}


@dataclass(frozen=True, slots=True)
class Base:
    """The base model of a receipt. place: its files; None: it has none (the fake backend's)."""

    name: str
    place: Path | None

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sha256": None if self.place is None else tensors_sha256(self.place),
        }


def sealed(receipt: dict[str, Any]) -> dict[str, Any]:
    """With the hashes of its parts."""
    parts = {name: _hash_of(value) for name, value in receipt.items()}
    return {"receipt": FORMAT, **receipt, "hashes": parts}


def checked(text: str) -> dict[str, Any]:
    """The parts of a receipt. Raises UserError for one that is not whole."""
    try:
        receipt = json.loads(text)
        number, hashes = receipt.pop("receipt"), receipt.pop("hashes")
        if number != FORMAT:
            raise UserError(f"this is a receipt of format {number}, made by a later version")
        wrong = [name for name in {*receipt, *hashes} if _hash_of(receipt[name]) != hashes[name]]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"this is no receipt: {type(error).__name__}: {error}") from None
    if wrong:
        raise UserError(f"the receipt was changed: {', '.join(sorted(wrong))} has another hash")
    return receipt


def _hash_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def described(output: SampleOutput) -> list[dict[str, Any]]:
    """The sequences of a sample. A float32 as JSON is its value as a float64, exactly."""
    return [
        {
            "tokens": sequence.tokens.tolist(),
            "logprobs": sequence.logprobs.tolist(),
            "stop_reason": sequence.stop_reason,
        }
        for sequence in output.sequences
    ]


@dataclass(frozen=True, slots=True)
class Workshop:
    """What receipts are made with. backend: of this process's own. scratch: an empty folder.
    weights_out: a folder to make, which gets the weights that a stranger needs for the check."""

    backend: Backend
    catalog: Catalog
    runs: KeptRuns
    scratch: Path
    weights_out: Path | None = None

    def hand_out(self, place: Path) -> None:
        if self.weights_out is not None:
            shutil.copytree(place, self.weights_out)

    async def reach(self, kept: KeptRun, position: int) -> None:
        """The run's model as it was after its operation at a position. Raises UserError where it
        cannot be brought there bit for bit."""
        replay = RunReplay(self.backend, self.catalog, self.runs)
        beginning = kept.nearest(position)
        async for repeated in replay.repeat(kept, beginning, position):
            require_agreement(repeated)

    async def state(self, model_id: str, name: str) -> Path:
        """A checkpoint of the model as it is now, with the optimizer's state."""
        place = self.scratch / name
        place.mkdir()
        await self.backend.save_model(model_id, place, with_optimizer=True)
        return place


def require_agreement(repeated: Repeated) -> None:
    if not repeated.agrees:
        operation = repeated.operation
        raise UserError(
            f"operation {operation.position} ({operation.kind}) of {operation.model_id} has other "
            "bits when it is done again here, so what follows from it gets no receipt: this "
            "machine, or what is installed on it, computes other ones"
        )


# ---- samples


async def receipt_of_sample(workshop: Workshop, base: Base, sampled: Sampled) -> dict[str, Any]:
    """Raises UserError where the weights are not kept, or other tokens come."""
    sampler = await workshop.runs.sampler(sampled)
    name = workshop.catalog.backend_name(sampler.base_model)
    body = SampleRequest.model_validate_json(sampled.request)
    request = workshop.catalog.converter(sampler.base_model).sample_request(body)
    result = described(decode_sample_output(sampled.body))
    async for place in _weights(workshop, sampler, sampled):
        source = FromBase(name) if place is None else FromCheckpoint(name, place)
        version = await workshop.backend.publish(source)
        if described(await workshop.backend.sample(version, request)) == result:
            break
    else:
        raise UserError(
            "drawn again here the sample has other bits, so it gets no receipt: this machine, or "
            f"what is installed on it, computes other ones ({workshop.backend.numerics()})"
        )
    weights = None
    if place is not None:
        sha256 = tensors_sha256(place, with_optimizer=False)
        weights = {"sha256": sha256, "path": sampler.model_path}
        workshop.hand_out(place)
    return sealed(
        {
            "of": SAMPLE,
            "base": base.described(),
            "weights": weights,
            "numerics": workshop.backend.numerics(),
            "asked": body.model_dump(mode="json", exclude_none=True, include=ASKED),
            "result": result,
        }
    )


async def _weights(
    workshop: Workshop, sampler: Sampler, sampled: Sampled
) -> AsyncIterator[Path | None]:
    """Folders of checkpoints with the weights of a sampler; None: the base model's. Several where
    those of an inflight sampler changed while the sample was drawn."""
    if sampler.kind == "base":
        yield None
        return
    if sampler.directory is not None:
        place = workshop.runs.files.data_dir / sampler.directory
        if not place.is_dir():
            raise UserError(f"the checkpoint {sampler.model_path} was deleted")
        yield place
        return
    operations = await _publications(workshop.runs, sampler, sampled)
    if not operations:
        raise UserError("the run that published these weights is not kept any more")
    kept = await workshop.runs.find(operations[0].model_id)
    for operation in operations:
        yield await _published(workshop, kept, operation.position)


async def _publications(
    runs: KeptRuns, sampler: Sampler, sampled: Sampled
) -> Sequence[RanOperation]:
    if sampler.kind == "inflight":
        assert sampler.model_id is not None
        return await runs.inflight(sampled, sampler.model_id)
    assert sampler.request_id is not None
    operation = await runs.operation(sampler.request_id)
    return [] if operation is None else [operation]


async def _published(workshop: Workshop, kept: KeptRun, position: int) -> Path:
    """What the run published by its operation at a position, as a checkpoint."""
    model_id = kept.run.model_id
    await workshop.backend.delete_model(model_id)
    await workshop.reach(kept, position)
    place = workshop.scratch / f"weights-{position}"
    place.mkdir()
    version = await workshop.backend.publish(FromModel(model_id))
    await workshop.backend.write_version(version, place)
    return place


# ---- steps


async def receipt_of_step(
    workshop: Workshop, base: Base, kept: KeptRun, step: int
) -> dict[str, Any]:
    """Raises UserError where the step is not kept, or comes out otherwise."""
    runs, model_id = workshop.runs, kept.run.model_id
    until = await runs.position_of_step(kept, step)
    first, _ = kept.steps
    after = 0 if kept.beginning is None else kept.beginning.position
    if step > first:
        after = await runs.position_of_step(kept, step - 1)
    async for operation in runs.operations(kept, after, until):
        if operation.kind == LOAD:  # what was before it does not matter
            after = operation.position
    before = None
    if after:
        await workshop.reach(kept, after)
        place = await workshop.state(model_id, "before")
        before = {"sha256": tensors_sha256(place)}
        workshop.hand_out(place)
    operations: list[dict[str, Any]] = []
    replay = RunReplay(workshop.backend, workshop.catalog, runs)
    async for repeated in replay.go_on(kept, after, until, step - 1):
        require_agreement(repeated)
        operations.append(_operation(repeated))
    after_sha256 = tensors_sha256(await workshop.state(model_id, "after"))
    if kept.beginning is not None and after == kept.beginning.position:
        await _require_whole(workshop, kept, step, until, after_sha256)
    return sealed(
        {
            "of": STEP,
            "base": base.described(),
            "run": model_id,
            "step": step,
            "before": before,
            "numerics": workshop.backend.numerics(),
            "operations": operations,
            "after": {"sha256": after_sha256},
        }
    )


async def _require_whole(
    workshop: Workshop, kept: KeptRun, step: int, until: int, after_sha256: str
) -> None:
    """Of a step that follows the snapshot with which what is kept begins. The snapshot has the
    gradient of passes that are not kept, if there were any; the checkpoint made of it has not.
    Raises UserError where the step comes out otherwise from the checkpoint."""
    assert kept.beginning is not None
    model_id, base_model = kept.run.model_id, workshop.catalog.backend_name(kept.model.base_model)
    before = workshop.scratch / "before"
    await workshop.backend.load_model(model_id, base_model, before, with_optimizer=True)
    replay = RunReplay(workshop.backend, workshop.catalog, workshop.runs)
    repeats = replay.go_on(kept, kept.beginning.position, until, step - 1)
    agree = [repeated.agrees async for repeated in repeats]
    if not all(agree) or tensors_sha256(await workshop.state(model_id, "again")) != after_sha256:
        raise UserError(
            f"step {step} gets no receipt: what is kept of the run begins within it, and its first "
            f"passes are not kept any more; steps from {step + 1} on are kept whole"
        )


def _operation(repeated: Repeated) -> dict[str, Any]:
    return {
        "kind": repeated.operation.kind,
        "seq_id": repeated.operation.seq_id,
        "request": base64.b64encode(repeated.operation.request).decode(),
        "result": base64.b64encode(repeated.computed).decode(),
    }
