"""Drafts by workers elsewhere; the first one that fits is taken.

What a worker sends is a guess about a sample from some place on. It is used when the sample's
tokens have become what it assumed, whenever it came: so an answer that is late may still serve, and
what a worker prepared for an outcome is there without asking. A worker that is dead, slow or wrong
costs the engine at most the time that it waits for answers, and a few times only.
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.learned_weights import LearnedWeights
from tinkercloud.speculative.remote.link import Link
from tinkercloud.speculative.remote.messages import STEPS, begin

MAX_BRANCHES, MAX_TOKENS = 16, 256
"""That are kept of a sample, and of one of them."""
MAX_LATE = 3  # answers in a row, after which a worker is not waited for until one is in time
MAX_UNASKED = 64  # messages between two rounds, after which a worker is dropped


@dataclass(frozen=True, slots=True)
class _Branch:
    worker: str
    base: int
    tokens: tuple[int, ...]
    confidences: bytes


@dataclass(eq=False, slots=True)
class _Worker:
    """num_sent: of each sample, how many of its tokens were sent. sent_s: of the last rounds.
    num_late: answers in a row; num_unasked: messages since the last question; num_taken: drafts.
    weights: digest of those that were sent."""

    link: Link
    is_open: bool = False
    num_sent: dict[int, int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    round: int = 0
    answered: int = 0
    num_late: int = 0
    num_unasked: int = 0
    num_taken: int = 0
    weights: str = ""
    sent_s: OrderedDict[int, float] = field(default_factory=OrderedDict)

    @property
    def is_waited_for(self) -> bool:
        return self.is_open and self.num_late < MAX_LATE and self.answered < self.round

    def reset(self) -> None:
        self.num_sent.clear()
        self.ended.clear()
        self.sent_s.clear()
        self.weights = ""
        self.num_late = self.num_unasked = 0
        self.answered = self.round


class RemoteDrafter(Drafter):
    """wait_s: for the answers of a round, at most. vocab_size: of the target, which is not asked
    about other tokens, whoever verifies. Audits need what a token was drawn from, which does not
    travel: it counts as coupled, without distributions."""

    name = "remote"
    is_coupled = True

    def __init__(self, links: Sequence[Link], wait_s: float, vocab_size: int):
        self._wait_s, self._vocab_size = wait_s, vocab_size
        self._workers = {link.name: _Worker(link) for link in links}
        self._lock = threading.Condition()
        self._branches: dict[int, deque[_Branch]] = {}
        self._weights: LearnedWeights | None = None
        self.counts: Counter[str] = Counter()
        for link in links:
            link.start(self)

    # ---- the contract of drafters, from the engine's thread

    def begin(self, stream: Stream) -> None:
        with self._lock:
            self._branches[stream.id] = deque(maxlen=MAX_BRANCHES)

    def end(self, stream: Stream) -> None:
        with self._lock:
            del self._branches[stream.id]
            for worker in self._workers.values():
                if worker.num_sent.pop(stream.id, None) is not None:
                    worker.ended.append(stream.id)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        with self._lock:
            self.counts["asked"] += len(requests)
            drafts = {stream.id: self._longest_fitting(stream, most) for stream, most in requests}
            self.counts["prepared"] += sum(map(bool, (d.tokens for d in drafts.values())))
            deadline_s = self._ask_all(requests)
            while True:
                for stream, most in requests:
                    if not drafts[stream.id].tokens:
                        drafts[stream.id] = self._longest_fitting(stream, most)
                left_s = deadline_s - time.monotonic()
                if all(d.tokens for d in drafts.values()) or left_s <= 0:
                    break
                if not any(worker.is_waited_for for worker in self._workers.values()):
                    break
                self._lock.wait(left_s)
            self._count_late(deadline_s)
            return [drafts[stream.id] for stream, _ in requests]

    def push(self, weights: LearnedWeights) -> None:
        """Workers draft with these from the next round on, and those that come later do."""
        with self._lock:
            self._weights = weights
            for worker in self._workers.values():
                if worker.is_open:
                    self._push(worker, weights)

    # ---- for those who verify several drafts at once

    def wait_connected(self, timeout_s: float) -> bool:
        """Whether a worker is connected, at the latest after that time."""
        with self._lock:
            return self._lock.wait_for(
                lambda: any(worker.is_open for worker in self._workers.values()), timeout_s
            )

    def branches(self, stream: Stream, most: int, limit: int) -> list[tuple[int, ...]]:
        """As `propose`, of all workers that answer in time: up to `limit` drafts, none the
        beginning of another."""
        with self._lock:
            self.counts["asked"] += 1
            self.counts["prepared"] += bool(self._fitting(stream, most))
            deadline_s = self._ask_all([(stream, most)])
            while any(worker.is_waited_for for worker in self._workers.values()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._lock.wait(left_s)
            self._count_late(deadline_s)
            fitting = [tokens for _, tokens in self._fitting(stream, most)]
        chains: list[tuple[int, ...]] = []
        for chain in sorted(fitting, key=len, reverse=True):
            if not any(kept[: len(chain)] == chain for kept in chains):
                chains.append(chain)
        return chains[:limit]

    # ---- of links, from their threads

    def opened(self, link: Link) -> None:
        with self._lock:
            worker = self._workers[link.name]
            worker.reset()
            worker.is_open = True
            if self._weights is not None:
                self._push(worker, self._weights)
            self._lock.notify_all()

    def closed(self, link: Link) -> None:
        with self._lock:
            self.counts["connections_lost"] += 1
            worker = self._workers[link.name]
            worker.is_open = False
            worker.reset()
            self._lock.notify_all()

    def received(self, link: Link, drafts: pb.Drafts) -> None:
        with self._lock:
            worker = self._workers[link.name]
            worker.num_unasked += 1
            if worker.num_unasked > MAX_UNASKED:
                self.counts["dropped_workers"] += 1
                link.drop("it sends more than it is asked for")
                return
            for number in drafts.forgotten:
                worker.num_sent.pop(number, None)
            for message in drafts.branches:
                self._keep(link.name, message)
            if worker.answered < drafts.round <= worker.round:
                worker.answered = drafts.round
                sent_s = worker.sent_s.get(drafts.round, float("-inf"))
                if time.monotonic() - sent_s <= self._wait_s:
                    worker.num_late = 0
            self._lock.notify_all()

    @property
    def is_connected(self) -> bool:
        """With all of its workers."""
        with self._lock:
            return all(worker.is_open for worker in self._workers.values())

    def close(self) -> None:
        for worker in self._workers.values():
            worker.link.close()

    def snapshot(self) -> dict[str, object]:
        with self._lock:
            return {
                "counts": dict(self.counts),
                "workers": {
                    name: {
                        "connected": w.is_open,
                        "waited_for": w.num_late < MAX_LATE,
                        "taken": w.num_taken,
                        "weights": w.weights,
                    }
                    for name, w in self._workers.items()
                },
            }

    # ----

    def _ask_all(self, requests: Sequence[tuple[Stream, int]]) -> float:
        """Until when answers are waited for."""
        for worker in self._workers.values():
            if worker.is_open:
                self._ask(worker, requests)
        return time.monotonic() + self._wait_s

    def _ask(self, worker: _Worker, requests: Sequence[tuple[Stream, int]]) -> None:
        worker.round += 1
        worker.num_unasked = 0
        message = pb.Round(number=worker.round, ended=worker.ended)
        worker.ended = []
        for stream, most in requests:
            length, num_sent = len(stream.tokens), worker.num_sent.get(stream.id)
            if num_sent is None:
                message.begun.append(begin(stream, length))
                num_sent = length
            message.deltas.append(
                pb.Delta(
                    id=stream.id, length=length, tokens=stream.tokens[num_sent:], max_tokens=most
                )
            )
            worker.num_sent[stream.id] = length
        if message.begun:
            worker.num_late = max(0, worker.num_late - 1)  # it has to read prompts first
        worker.sent_s[worker.round] = time.monotonic()
        if len(worker.sent_s) > MAX_UNASKED:
            worker.sent_s.popitem(last=False)
        self.counts["sent_bytes"] += message.ByteSize()
        if not worker.link.send(message):
            worker.is_open = False
            worker.link.drop("it does not read what it is sent")

    def _push(self, worker: _Worker, weights: LearnedWeights) -> None:
        if not all(worker.link.push(message) for message in weights.messages()):
            worker.is_open = False
            worker.link.drop("it does not read what it is sent")
            return
        worker.weights = weights.short_digest
        self.counts["weights_sent"] += 1

    def _keep(self, worker: str, message: pb.Branch) -> None:
        branches = self._branches.get(message.id)
        if branches is None:
            return
        tokens, confidences = tuple(message.tokens), message.confidences
        is_draft = 0 < len(tokens) == len(confidences) <= MAX_TOKENS
        if not is_draft or max(tokens) >= self._vocab_size:
            self.counts["invalid"] += 1
            return
        branches.append(_Branch(worker, message.base, tokens, confidences))

    def _longest_fitting(self, stream: Stream, most: int) -> Draft:
        """The longest that fits, of equally long ones the first that came."""
        fitting = self._fitting(stream, most)
        if not fitting:
            return NO_DRAFT
        best, tokens = max(fitting, key=lambda pair: len(pair[1]))
        self._workers[best.worker].num_taken += 1
        first = len(stream.tokens) - best.base
        confidences = best.confidences[first : first + len(tokens)]
        return Draft(tokens, tuple(value / STEPS for value in confidences))

    def _fitting(self, stream: Stream, most: int) -> list[tuple[_Branch, tuple[int, ...]]]:
        """With the tokens that they add, the first that came first; those that do not fit any more
        are dropped."""
        branches, fitting = self._branches[stream.id], []
        for each in list(branches):
            new = tuple(stream.tokens[each.base :])
            if len(stream.tokens) < each.base or each.tokens[: len(new)] != new:
                branches.remove(each)
            elif rest := each.tokens[len(new) :][:most]:
                fitting.append((each, rest))
        return fitting

    def _count_late(self, deadline_s: float) -> None:
        if time.monotonic() < deadline_s:
            return
        for worker in self._workers.values():
            if worker.is_waited_for:
                worker.num_late += 1
                self.counts["late"] += 1
