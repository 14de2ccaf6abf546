"""Drafting from text seen before: a suffix automaton of what a group of samples has written.

An automaton of n tokens has at most 2n states and is made in O(n) (Blumer et al. 1985). Each state
is the set of strings that end at the same places, and counts them, so that a continuation comes
with the share of the times that it followed. Nothing is trained.

Most states have one edge. That one lies in arrays, and only further ones in a dict: 110 bytes a
token of program text where a dict for each state took 450.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from tinkercloud.speculative.drafters.drafter import Draft

ROOT = 0
NONE = -1
COUNTED_LINKS = 16  # suffixes of a new token that are counted: all but in text of one token
EMPTY_BYTES = 900  # five arrays, a dict, and what holds them
STATE_BYTES = 23  # five numbers, and what arrays keep in reserve
BRANCH_BYTES = 260  # a dict with its place among the branches
EDGE_BYTES = 50  # one more edge in it


@dataclass(frozen=True, slots=True)
class ContinuationRule:
    """How far to trust what followed.

    share: a continuation ends where the product of its confidences falls below. shortest: the least
    match to draft from.

    What followed a match was often seen once, and says little alone: after "= " in a table of sums
    there is another number each time. So the shares after its shorter suffixes count too, each of
    them that occurs at more places than the one before, `num_shorter` at most: as `shorter`
    occurrences of the longer one (a Dirichlet prior, as MacKay and Peto 1995); as half as many
    where that has `long` tokens, which tell of a text that repeats as a whole, and ever fewer
    beyond. doubt: how often something else is taken to have followed the shortest of them, in
    addition to what was counted, if it has one token; if it has n, the nth part of that.
    """

    share: float = 0.1
    shortest: int = 1
    doubt: float = 2.0
    shorter: float = 2.0
    num_shorter: int = 3
    long: int = 24


class Automaton:
    """Every substring of texts, with how often it occurs. Several may be written alternately: the
    caller keeps the state in which each one ends, ROOT where it begins."""

    def __init__(self) -> None:
        self._link = array("i", [NONE])
        self._length = array("i", [0])
        self._count = array("i", [0])
        self._token = array("i", [NONE])  # the edge that came first
        self._next = array("i", [NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._num_more = 0

    def __len__(self) -> int:
        """States."""
        return len(self._link)

    @property
    def num_bytes(self) -> int:
        """Memory, estimated by measured sizes."""
        branches = BRANCH_BYTES * len(self._more) + EDGE_BYTES * self._num_more
        return EMPTY_BYTES + STATE_BYTES * len(self) + branches

    def length(self, state: int) -> int:
        """Of the longest string of a state."""
        return self._length[state]

    def write(self, state: int, tokens: Iterable[int]) -> int:
        """Adds tokens, at least 0, to the text that ends in `state`; where it ends then."""
        link, count = self._link, self._count
        for token in tokens:
            state = suffix = self._extend(state, token)
            for _ in range(COUNTED_LINKS):
                if suffix == ROOT:
                    break
                count[suffix] += 1
                suffix = link[suffix]
        return state

    def _after(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def _connect(self, state: int, token: int, following: int) -> None:
        if self._token[state] in (NONE, token):
            self._token[state] = token
            self._next[state] = following
            return
        more = self._more.setdefault(state, {})
        self._num_more += token not in more
        more[token] = following

    def _extend(self, last: int, token: int) -> int:
        following = self._after(last, token)
        if following != NONE:  # an earlier text went on like this
            return self._exactly(last, following, token)
        state = self._new(self._length[last] + 1, ROOT, 0)
        at = last
        while at != NONE and (following := self._after(at, token)) == NONE:
            self._connect(at, token, state)
            at = self._link[at]
        if at != NONE:
            self._link[state] = self._exactly(at, following, token)
        return state

    def _exactly(self, at: int, following: int, token: int) -> int:
        """The state after `at` whose longest string is that of `at` and the token: `following`, or
        a copy of it with its shorter strings, which from now on end at more places than the
        others."""
        if self._length[following] == self._length[at] + 1:
            return following
        copy = self._new(self._length[at] + 1, self._link[following], self._count[following])
        self._token[copy] = self._token[following]
        self._next[copy] = self._next[following]
        if following in self._more:
            self._more[copy] = dict(self._more[following])
            self._num_more += len(self._more[copy])
        self._link[following] = copy
        while at != NONE and self._after(at, token) == following:
            self._connect(at, token, copy)
            at = self._link[at]
        return copy

    def _new(self, length: int, link: int, count: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._token.append(NONE)
        self._next.append(NONE)
        return len(self._link) - 1

    def follow(self, state: int, length: int, tokens: Iterable[int]) -> tuple[int, int]:
        """A text of which `length` tokens are a string of `state` goes on: the state and the length
        of its longest suffix that was seen."""
        for token in tokens:
            following = self._after(state, token)
            while following == NONE and state != ROOT:
                state = self._link[state]
                length = self._length[state]
                following = self._after(state, token)
            state, length = (ROOT, 0) if following == NONE else (following, length + 1)
        return state, length

    def step_or_likeliest(self, state: int, token: int) -> tuple[int, bool]:
        """The state after that token, or where it never followed, after the one that most often
        did; and whether it was the token. NONE where nothing ever followed."""
        following = self._after(state, token)
        if following != NONE or self._token[state] == NONE:
            return following, following != NONE
        return self._likeliest(state)[1], False

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix that was followed by anything: its state and its length."""
        while self._token[state] == NONE and state != ROOT:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def continuation(self, state: int, length: int, most: int, rule: ContinuationRule) -> Draft:
        """What most often followed, of equals what was seen first, token by token; where a text
        ends, what followed the longest suffix of it that went on elsewhere."""
        tokens: list[int] = []
        shares: list[float] = []
        product = 1.0
        while len(tokens) < most:
            state, length = self.continued(state, length)
            if length < rule.shortest:
                break
            token, following, times = self._likeliest(state)
            share = self._share(state, length, token, (self._count[following], times), rule)
            product *= share
            if product < rule.share:
                break
            tokens.append(token)
            shares.append(share)
            state, length = following, length + 1
        return Draft(tuple(tokens), tuple(shares))

    def _likeliest(self, state: int) -> tuple[int, int, int]:
        """The token, the state after it, and how often any followed."""
        count = self._count
        token, following = self._token[state], self._next[state]
        best = times = count[following]
        for other, after in self._more.get(state, {}).items():
            times += count[after]
            if count[after] > best:
                token, following, best = other, after, count[after]
        return token, following, times

    def _share(
        self, state: int, length: int, token: int, counts: tuple[int, int], rule: ContinuationRule
    ) -> float:
        """How often `length` tokens, a string of `state`, are followed by the token. counts: how
        often they were, and by any."""
        chain = [(*counts, length)]
        link, count = self._link, self._count
        while len(chain) <= rule.num_shorter and link[state] != ROOT:
            state = link[state]
            chain.append((count[self._after(state, token)], count[state], self._length[state]))
        followed, times, shortest = chain.pop()
        share = followed / (times + rule.doubt / shortest)
        for followed, times, length in reversed(chain):
            ratio = length / rule.long
            weight = rule.shorter / (1 + ratio * ratio)
            share = (followed + weight * share) / (times + weight)
        return share
