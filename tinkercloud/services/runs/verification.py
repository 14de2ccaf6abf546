"""A receipt checked: computed again from the same base, weights and request."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinker_gmi.types import SampleRequest
from tinkercloud.backends.base import Backend
from tinkercloud.core.types import FromBase, FromCheckpoint, num_equal
from tinkercloud.errors import UserError
from tinkercloud.fingerprints import tensors_sha256
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.recovery.lane_operations import FORWARD_BACKWARD
from tinkercloud.services.recovery.replayer import Replayer
from tinkercloud.services.recovery.training_outcomes import deviation
from tinkercloud.services.runs.receipts import SAMPLE, Base, described
from tinkercloud.storage.journal import RanOperation


@dataclass(frozen=True, slots=True)
class Checked:
    """same_class: whether this machine computes the bits of the one that made the receipt.
    deviation: the largest difference of a log-probability, in nats, over what both have; None:
    there is nothing to compare."""

    is_same: bool
    same_class: bool
    what: str
    deviation: float | None = None

    def __str__(self) -> str:
        if self.is_same:
            return f"verified: {self.what}, bit for bit"
        nats = "" if self.deviation is None else f"; largest difference {self.deviation:.3g} nats"
        if not self.same_class:
            return f"cannot check bits: another class of numerics made it; {self.what}{nats}"
        return f"NOT verified: {self.what}{nats}"


class Verifier:
    """backend: of this process's own. base: the base model that the receipt names, as it is here.
    scratch: an empty folder."""

    def __init__(self, backend: Backend, catalog: Catalog, base: Base, scratch: Path):
        self._backend = backend
        self._catalog = catalog
        self._base = base
        self._scratch = scratch

    async def check(self, receipt: dict[str, Any], weights: Path | None) -> Checked:
        """weights: the folder of the checkpoint that the receipt names. Raises UserError where base
        or weights are not those of the receipt."""
        mine = self._base.described()["sha256"]
        if mine != receipt["base"]["sha256"]:
            raise UserError(
                f"{self._base.name} here has other weights than the base model of the receipt: "
                f"SHA-256 {mine}, not {receipt['base']['sha256']}"
            )
        same_class = self._backend.numerics() == receipt["numerics"]
        if receipt["of"] == SAMPLE:
            return await self._check_sample(receipt, weights, same_class)
        return await self._check_step(receipt, weights, same_class)

    async def _check_sample(
        self, receipt: dict[str, Any], weights: Path | None, same_class: bool
    ) -> Checked:
        place = _checked_weights(receipt["weights"], weights, with_optimizer=False)
        name = self._catalog.backend_name(self._base.name)
        source = FromBase(name) if place is None else FromCheckpoint(name, place)
        body = SampleRequest.model_validate(receipt["asked"])
        request = self._catalog.converter(self._base.name).sample_request(body)
        output = await self._backend.sample(await self._backend.publish(source), request)
        mine, theirs = described(output), receipt["result"]
        num_tokens = sum(len(sequence["tokens"]) for sequence in theirs)
        if mine == theirs:
            return Checked(True, same_class, f"{num_tokens} tokens and their log-probabilities")
        num_same, largest = 0, 0.0
        for ours, expected in zip(mine, theirs, strict=False):
            common = num_equal(ours["tokens"], expected["tokens"])
            num_same += common
            there = np.array(ours["logprobs"][:common]) - np.array(expected["logprobs"][:common])
            largest = max(largest, float(np.abs(there).max(initial=0.0)))
        what = f"{num_same} of {num_tokens} tokens are the same"
        return Checked(False, same_class, what, largest)

    async def _check_step(
        self, receipt: dict[str, Any], weights: Path | None, same_class: bool
    ) -> Checked:
        name, model_id = self._catalog.backend_name(self._base.name), receipt["run"]
        place = _checked_weights(receipt["before"], weights, with_optimizer=True)
        if place is not None:
            await self._backend.load_model(model_id, name, place, with_optimizer=True)
        replayer, num_same, largest = Replayer(self._backend), 0, 0.0
        for described_operation in receipt["operations"]:
            operation = _operation(model_id, described_operation)
            computed = await replayer.do(operation, name, self._scratch)
            theirs = base64.b64decode(described_operation["result"])
            num_same += computed == theirs
            if computed != theirs and operation.kind == FORWARD_BACKWARD:
                largest = max(largest, deviation(computed, theirs))
        after = self._scratch / "after"
        after.mkdir()
        await self._backend.save_model(model_id, after, with_optimizer=True)
        same_state = tensors_sha256(after) == receipt["after"]["sha256"]
        num = len(receipt["operations"])
        state = "the state after them" if same_state else "NOT the state after them"
        is_same = same_state and num_same == num
        what = f"{num_same} of {num} operations and {state}"
        return Checked(is_same, same_class, what, None if is_same else largest)


def _checked_weights(
    needed: dict[str, Any] | None, weights: Path | None, *, with_optimizer: bool
) -> Path | None:
    if needed is None:
        return None
    named = needed.get("path")
    if weights is None:
        raise UserError(
            "the receipt needs a checkpoint: name its folder with --weights"
            + (f" (it was {named})" if named else "")
        )
    mine = tensors_sha256(weights, with_optimizer=with_optimizer)
    if mine != needed["sha256"]:
        raise UserError(
            f"{weights} does not hold the weights of the receipt: SHA-256 {mine}, not "
            f"{needed['sha256']}"
        )
    return weights


def _operation(model_id: str, described_operation: dict[str, Any]) -> RanOperation:
    return RanOperation(
        request_id="",
        user="",
        model_id=model_id,
        kind=described_operation["kind"],
        seq_id=described_operation["seq_id"],
        position=0,
        digest=None,
        took_s=0.0,
        request=base64.b64decode(described_operation["request"]),
    )
