"""Where draft and target disagreed, and some cases where they agreed: what a draft learns from.

A case names its context by a digest; the tokens of a context are kept once, however many cases lie
in it. Axes: N tokens of a context, M most probable tokens of the target.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.errors import UserError
from tinkercloud.speculative.learning.replay_buffer import ReplayBuffer, sample_mix

CASE_BYTES = 600  # of a case without its arrays, an estimate from above
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One drafted token and the target's token of the same position.

    context: digest of the tokens it lies in; position: the index in them that was drawn, after
    tokens[:position]. top_ids int32 (M,), top_probs float32 (M,): the target's most probable tokens
    at the sampling temperature, the drafted one among them.
    """

    context: str
    position: int
    drafted: int
    target: int
    top_ids: NDArray[np.int32]
    top_probs: NDArray[np.float32]
    temperature: float
    version: str
    epoch: int
    category: str = ""

    def within(self, context: str) -> "Case":
        """The same in a context of that digest."""
        return replace(self, context=context)

    @property
    def agreed(self) -> bool:
        return self.drafted == self.target

    @property
    def rest(self) -> float:
        """The target's mass on all other tokens."""
        return max(0.0, 1.0 - float(self.top_probs.sum()))

    @property
    def num_bytes(self) -> int:
        return CASE_BYTES + self.top_ids.nbytes + self.top_probs.nbytes


def digest(tokens: Tokens) -> str:
    return hashlib.blake2b(
        np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16
    ).hexdigest()


class CaseStore:
    """Disagreements and agreed cases, a replay buffer each, over contexts that they share.

    max_bytes bounds everything, contexts included; agreed cases get at most `agreed_share` of it.
    """

    def __init__(self, max_bytes: int, max_age: int, agreed_share: float = 0.2):
        self.max_bytes, self.max_age = max_bytes, max_age
        self.disagreed: ReplayBuffer[Case] = ReplayBuffer(max_bytes, self._forget)
        self.agreed: ReplayBuffer[Case] = ReplayBuffer(int(max_bytes * agreed_share), self._forget)
        self._contexts: dict[str, tuple[Tokens, int]] = {}
        self.num_added = 0
        self._context_bytes = 0

    def __len__(self) -> int:
        return len(self.disagreed) + len(self.agreed)

    @property
    def num_bytes(self) -> int:
        return self.disagreed.num_bytes + self.agreed.num_bytes + self._context_bytes

    def tokens(self, case: Case) -> Tokens:
        """The tokens before the case's position, (position,)."""
        return self._contexts[case.context][0][: case.position]

    def whole(self, case: Case) -> Tokens:
        """The text that the case lies in."""
        return self._contexts[case.context][0]

    def add(self, tokens: Tokens, case: Case) -> None:
        """tokens (N,): the context that `case.context` names. Raises ValueError for a position that
        is not in it or behind its end."""
        if not 0 < case.position <= len(tokens):
            raise ValueError(f"position {case.position} of {len(tokens)} tokens")
        self.num_added += 1
        self._remember(case.context, tokens)
        buffer = self.agreed if case.agreed else self.disagreed
        buffer.add(case, case.num_bytes)
        while self.num_bytes > self.max_bytes and len(self):
            max(self.disagreed, self.agreed, key=len).drop_oldest()

    def expire(self, epoch: int) -> None:
        """Drop the cases of versions that are more than `max_age` older than version `epoch`."""
        self.disagreed.expire(epoch - self.max_age)
        self.agreed.expire(epoch - self.max_age)

    def sample(
        self,
        count: int,
        generator: np.random.Generator,
        share: float = 0.8,
        where: Callable[[Case], bool] = lambda case: True,
    ) -> list[Case]:
        """`share` of them disagreements, the others agreed cases against forgetting."""
        disagreed, agreed = (
            [case for case in buffer if where(case)] for buffer in (self.disagreed, self.agreed)
        )
        return sample_mix(disagreed, agreed, count, share, generator)

    # ---- JSONL

    def lines(self) -> Iterator[str]:
        """A JSON object for each case, oldest first; the first of a context carries its tokens."""
        written: set[str] = set()
        for case in (*self.agreed, *self.disagreed):
            line = _as_json(case)
            if case.context not in written:
                line["tokens"] = self._contexts[case.context][0].tolist()
                written.add(case.context)
            yield json.dumps(line)

    def write(self, path: Path) -> None:
        """All lines; readers of the file get the old one or the new one."""
        unfinished = path.with_suffix(".new")
        with unfinished.open("w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in self.lines())
        unfinished.replace(path)

    def read(self, lines: Iterable[str]) -> int:
        """Add what `lines` wrote; how many cases. Raises UserError naming a bad line."""
        contexts: dict[str, Tokens] = {}
        count = 0
        for number, line in enumerate(lines, 1):
            try:
                raw = json.loads(line)
                if "tokens" in raw:
                    contexts[raw["context"]] = _checked_tokens(raw)
                case = _from_json(raw)
                self.add(contexts[case.context], case)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise UserError(f"line {number} is no case: {error!r}") from error
            count += 1
        return count

    # ---- contexts

    def _remember(self, context: str, tokens: Tokens) -> None:
        kept, uses = self._contexts.get(context, (None, 0))
        if kept is None:
            kept = np.array(tokens, np.int32)  # not a view of something larger
            self._context_bytes += kept.nbytes
        self._contexts[context] = (kept, uses + 1)

    def _forget(self, case: Case) -> None:
        tokens, uses = self._contexts[case.context]
        if uses > 1:
            self._contexts[case.context] = (tokens, uses - 1)
        else:
            del self._contexts[case.context]
            self._context_bytes -= tokens.nbytes


def _as_json(case: Case) -> dict[str, Any]:
    values = {field.name: getattr(case, field.name) for field in fields(case)}
    return {**values, "top_ids": case.top_ids.tolist(), "top_probs": case.top_probs.tolist()}


def _from_json(raw: dict[str, Any]) -> Case:
    ids = np.array(raw["top_ids"], np.int32)
    probs = np.array(raw["top_probs"], np.float32)
    if ids.shape != probs.shape or ids.ndim != 1 or not np.isfinite(probs).all():
        raise ValueError("top_ids and top_probs are no distribution")
    return Case(
        str(raw["context"]),
        int(raw["position"]),
        int(raw["drafted"]),
        int(raw["target"]),
        ids,
        probs,
        float(raw["temperature"]),
        str(raw["version"]),
        int(raw["epoch"]),
        str(raw.get("category", "")),
    )


def _checked_tokens(raw: dict[str, Any]) -> Tokens:
    tokens = np.array(raw["tokens"], np.int32)
    if digest(tokens) != raw["context"]:
        raise ValueError("the tokens are not those of the digest")
    return tokens
