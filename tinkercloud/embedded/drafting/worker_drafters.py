"""The drafters of a worker that drafts for engines elsewhere: one for each vocabulary."""

import logging
from math import isfinite
from weakref import WeakSet

from safetensors import SafetensorError
from safetensors.torch import load
from tokenizers import Tokenizer

from tinkercloud.embedded.drafting.draft_model import draft_pool
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.network_drafter import NetworkDrafter
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.remote.learned_weights import LearnedWeights
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.worker import NeedsTokenizer
from tinkercloud.weights.adapters import Adapter, adapter_of
from tinkercloud.weights.token_bytes import TokenizerPair
from tinkercloud.weights.tokenizer import vocabulary_digest

logger = logging.getLogger(__name__)

MAX_VOCABULARIES, MAX_RANK = 8, 1024


class WorkerDrafters:
    """pool_bytes: for keys and values of each drafter. Raises NeedsTokenizer and ConfigError when
    called."""

    def __init__(self, draft: BaseModel, runner: Runner, pool_bytes: int):
        self._draft, self._runner, self._pool_bytes = draft, runner, pool_bytes
        decoder = draft.decoder
        self._digest = b"" if decoder is None else vocabulary_digest(decoder)
        self._drafters: dict[bytes, Drafter] = {}
        self._learned: WeakSet[Drafter] = WeakSet()  # of one engine each

    def __call__(self, target: Target) -> Drafter:
        digest = target.vocabulary_digest
        key = digest or target.vocab_size.to_bytes(8, "little")
        if key not in self._drafters:
            draft = self._draft
            drafter = self._new(target, Version(draft.name, draft, draft.weights, None, 1.0))
            if len(self._drafters) >= MAX_VOCABULARIES:
                raise ConfigError(f"this worker drafts for {MAX_VOCABULARIES} vocabularies already")
            self._drafters[key] = drafter
        return self._drafters[key]

    def learned(self, target: Target, drafter: Drafter, weights: LearnedWeights) -> Drafter:
        """As `worker.Learn` has it."""
        adapter, draft = _adapter(weights, self._draft), self._draft
        name = f"{draft.name} {weights.short_digest}"
        version = Version(name, draft, draft.weights, adapter, weights.scale)
        self._runner.rest()  # it keeps what it made of earlier ones
        if isinstance(drafter, NetworkDrafter) and drafter in self._learned:
            drafter.use(version)
            return drafter
        learned = self._new(target, version)
        self._learned.add(learned)
        return learned

    def _new(self, target: Target, version: Version) -> Drafter:
        draft, digest = self._draft, target.vocabulary_digest
        if digest == self._digest != b"" or (
            b"" in (digest, self._digest) and target.vocab_size == draft.config.vocab_size
        ):
            return ModelDrafter(version, self._runner, self._pool(), with_seconds=True)
        if draft.decoder is None or not digest:
            without = target.model if not digest else draft.name
            raise ConfigError(
                f"{without} has no tokenizer.json, and {target.vocab_size} tokens are not "
                f"{draft.config.vocab_size}: drafts through text need the tokenizers of both"
            )
        if target.tokenizer is None:
            raise NeedsTokenizer
        pair = TokenizerPair.of(_tokenizer(target.tokenizer, digest), draft.decoder)
        logger.info("%s has other tokens than %s: through text", target.model, draft.name)
        return TextModelDrafter(version, self._runner, self._pool(), pair)

    def _pool(self) -> BlockPool:
        return draft_pool(self._draft, self._runner, self._pool_bytes)


def _adapter(weights: LearnedWeights, draft: BaseModel) -> Adapter:
    """Raises ConfigError where it is none of this model."""
    try:
        tensors = load(weights.content)
    except SafetensorError as error:
        raise ConfigError(f"they cannot be read: {error}") from None
    if not isfinite(weights.scale) or not all(t.isfinite().all() for t in tensors.values()):
        raise ConfigError("they are not finite")
    shapes = draft.config.linear_shapes()
    try:
        adapter = adapter_of(tensors)
    except KeyError as missing:
        raise ConfigError(f"there is no {missing}") from None
    if len(tensors) != 2 * len(adapter):
        raise ConfigError("they are no adapter")
    for name, (a, b) in adapter.items():
        out_features, in_features = shapes.get(name, (0, 0))
        rank = a.shape[0] if a.ndim == 2 else 0
        if not 0 < rank <= MAX_RANK or a.shape[1] != in_features:
            raise ConfigError(f"{name} is not as in {draft.name}")
        if b.shape != (out_features, rank):
            raise ConfigError(f"{name} is not as in {draft.name}")
    device = draft.device
    return {n: (a.float().to(device), b.float().to(device)) for n, (a, b) in adapter.items()}


def _tokenizer(text: str, digest: bytes) -> Tokenizer:
    """Raises ConfigError where it is not the one with this digest."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the package raises the bare class
        raise ConfigError(f"the target's tokenizer cannot be read: {error}") from None
    if vocabulary_digest(tokenizer) != digest:
        raise ConfigError("the target's tokenizer is not the one that it named")
    return tokenizer
