"""The base of drafters that run a language model of their own over many samples at once.

Keys and values of each sample are kept, and drafting goes on from there. Forward passes are ragged:
first the new tokens of every sample, then one row of each for every further token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tinkercloud.decoding.sampler import RowParams, Scan
from tinkercloud.embedded.forward.batch import SequenceRows, ragged
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, block_digests
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.drafter import Drafter, Stream

MAX_CATCH_UP = 512  # new tokens that one sample reads in a round; with more it drafts later
MAX_STEADY = 16  # new tokens of a sample that is drafted for in every round, from above


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sample, all its tokens as the network reads them, and how many more to draft at most."""

    id: int
    tokens: Sequence[int]
    max_tokens: int


@dataclass(slots=True)
class Chain:
    """The draft for a sample; probs: the probability of each token, in 0..1."""

    id: int
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)


NextTokens = Callable[[Sequence[Chain], Tensor], tuple[list[int], list[float]]]
"""The next token of each chain and its probability, by logits (chains, V)."""


@dataclass(slots=True, eq=False)
class _Cache:
    """tokens: those whose keys and values are in the blocks, drafted ones too. num_agreed: how many
    of them were once seen to be the sample's. num_found: of the first blocks, those that may be
    other samples' too, and are only read."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_agreed: int = 0
    num_found: int = 0
    salt: str = ""

    def common(self, tokens: Sequence[int]) -> int:
        """Length of the longest common prefix, without the last of `tokens`, which is to be read
        for its logits."""
        limit = min(len(self.tokens), len(tokens) - 1)
        place = min(self.num_agreed, limit)
        while place < limit and self.tokens[place] == tokens[place]:
            place += 1
        return place

    def rewind(self, tokens: Sequence[int]) -> None:
        """To the longest common prefix."""
        self.num_agreed = self.common(tokens)
        del self.tokens[self.num_agreed :]


@dataclass(slots=True)
class _Drafting:
    cache: _Cache
    tokens: Sequence[int]
    max_tokens: int
    chain: Chain


class NetworkDrafter(Drafter):
    """The version's weights may be replaced between rounds (`use`). Keys and values stay after the
    end of a sample as long as there is room, for those that begin with its tokens: the next turn
    of a conversation reads only what is new."""

    name = "model"

    def __init__(self, version: Version, runner: Runner, pool: BlockPool):
        self.version, self._runner, self._pool = version, runner, pool
        self._caches: dict[int, _Cache] = {}  # by stream
        self._max_length = version.base.config.max_position_embeddings
        self._vocab_size = version.base.config.vocab_size

    @property
    def scan(self) -> Scan | None:
        return self._runner.scan

    def use(self, version: Version) -> None:
        """Other weights of the same network: keys and values of the old ones are dropped."""
        for cache in self._caches.values():
            self._shorten(cache, 0)
        self._pool.forget(self.version.id)
        self.version = version

    def begin(self, stream: Stream) -> None:
        self._caches[stream.id] = _Cache(salt=stream.salt)

    def end(self, stream: Stream) -> None:
        cache = self._caches.pop(stream.id)
        digests = block_digests(self.version.id, cache.salt, cache.tokens)
        for block, digest in zip(cache.blocks, digests, strict=False):
            self._pool.register(block, self.version.id, digest)
        self._pool.free(cache.blocks)

    def forget_ended(self, before_s: float) -> None:
        self._pool.forget_unused(before_s)

    def _changed(self, sample: int, place: int) -> None:
        """Its tokens from this place on may be others than those that were read."""
        cache = self._caches[sample]
        cache.num_agreed = min(cache.num_agreed, place)

    def _fork(self, sample: int, other: int, tokens: Sequence[int]) -> bool:
        """Makes `other` a sample with these tokens, and with the keys and values that `sample` has
        of them; False where there is no room."""
        source = self._caches[sample]
        place = source.common(tokens)
        num_whole, num_begun = divmod(place, BLOCK_TOKENS)
        begun = self._pool.allocate(1) if num_begun else []
        if begun is None:
            return False
        if begun:
            self._pool.copy(source.blocks[num_whole], begun[0])
        shared = source.blocks[:num_whole]
        self._pool.acquire(shared)
        self._caches[other] = _Cache(list(tokens[:place]), [*shared, *begun], place)
        return True

    def _read_ahead(self, requests: Sequence[DraftRequest]) -> None:
        """What they have not read but for the last token, where that is more than one round adds.
        Call it in inference mode."""
        for request in requests:
            drafting = self._begun(request)
            while drafting is not None:
                unread = drafting.tokens[len(drafting.cache.tokens) : -1]
                if len(unread) < MAX_STEADY:
                    break
                self._forward([self._part(drafting.cache, unread[:MAX_CATCH_UP])])

    def _chains(
        self, requests: Sequence[DraftRequest], next_tokens: NextTokens,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> dict[int, Chain]:  # fmt: skip
        """By sample; none where there is no room, an empty one for a sample too far behind. They
        end where is_stale, which is asked between two passes. Call it in inference mode."""
        draftings = [drafting for r in requests if (drafting := self._begun(r)) is not None]
        active = self._caught_up(draftings, next_tokens)
        while active and not is_stale():
            parts = [self._part(each.cache, each.chain.tokens[-1:]) for each in active]
            active = self._extended(active, self._forward(parts), next_tokens)
        return {drafting.chain.id: drafting.chain for drafting in draftings}

    def _begun(self, request: DraftRequest) -> _Drafting | None:
        cache, length = self._caches[request.id], len(request.tokens)
        max_tokens = min(request.max_tokens, self._max_length - length)
        if max_tokens < 1 or not length:
            return None
        self._rewind(cache, request.tokens)
        if max(request.tokens[len(cache.tokens) :]) >= self._vocab_size:
            return None  # a target may have more rows than its tokenizer has tokens
        if not self._pool.extend(cache.blocks, length + max_tokens):
            return None
        return _Drafting(cache, request.tokens, max_tokens, Chain(request.id))

    def _rewind(self, cache: _Cache, tokens: Sequence[int]) -> None:
        """To what it has of these tokens, or to what ended samples left of them."""
        if not cache.blocks:
            digests = block_digests(self.version.id, cache.salt, tokens[:-1])
            cache.blocks = self._pool.find(digests)
            cache.num_found = len(cache.blocks)
            cache.tokens = list(tokens[: cache.num_found * BLOCK_TOKENS])
        cache.rewind(tokens)
        if len(cache.tokens) < cache.num_found * BLOCK_TOKENS:
            self._shorten(cache, len(cache.tokens) // BLOCK_TOKENS)

    def _shorten(self, cache: _Cache, num_blocks: int) -> None:
        self._pool.free(cache.blocks[num_blocks:])
        del cache.blocks[num_blocks:], cache.tokens[num_blocks * BLOCK_TOKENS :]
        cache.num_found = min(cache.num_found, num_blocks)
        cache.num_agreed = min(cache.num_agreed, len(cache.tokens))

    def _caught_up(self, draftings: list[_Drafting], next_tokens: NextTokens) -> list[_Drafting]:
        """All read their new tokens; those that have read the last one have their first draft."""
        parts, ready = [], []
        for drafting in draftings:
            tokens = drafting.tokens[len(drafting.cache.tokens) :]
            if len(tokens) <= MAX_CATCH_UP:
                ready.append(drafting)
                parts.append(self._part(drafting.cache, tokens))
            else:
                self._forward([self._part(drafting.cache, tokens[:MAX_CATCH_UP])])
        return self._extended(ready, self._forward(parts), next_tokens) if parts else []

    def _part(self, cache: _Cache, tokens: Sequence[int]) -> SequenceRows:
        part = SequenceRows(self.version, tokens, len(cache.tokens), cache.blocks, 1)
        cache.tokens += tokens
        return part

    def _forward(self, parts: Sequence[SequenceRows]) -> Tensor:
        return self._runner.forward(ragged(parts), self._pool)

    @staticmethod
    def _extended(
        draftings: list[_Drafting], logits: Tensor, next_tokens: NextTokens
    ) -> list[_Drafting]:
        """One more token each; returns those that draft yet more."""
        tokens, probs = next_tokens([drafting.chain for drafting in draftings], logits)
        for drafting, token, prob in zip(draftings, tokens, probs, strict=True):
            drafting.chain.tokens.append(token)
            drafting.chain.probs.append(min(1.0, prob))
        return [each for each in draftings if len(each.chain.tokens) < each.max_tokens]


def row_params(stream: Stream, ahead: int) -> RowParams:
    """The parameters with which the target draws its token of the place `ahead` after the next."""
    return RowParams(stream.params, stream.sample_index, len(stream.tokens) + ahead)
