"""The drafters of a worker that drafts for engines elsewhere: one for each vocabulary."""

import logging

from tokenizers import Tokenizer

from tinkercloud.embedded.drafting.draft_model import draft_pool
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.worker import NeedsTokenizer
from tinkercloud.weights.token_bytes import TokenizerPair
from tinkercloud.weights.tokenizer import vocabulary_digest

logger = logging.getLogger(__name__)

MAX_VOCABULARIES = 8


class WorkerDrafters:
    """pool_bytes: for keys and values of each drafter. Raises NeedsTokenizer and ConfigError when
    called."""

    def __init__(self, draft: BaseModel, runner: Runner, pool_bytes: int):
        self._draft, self._runner, self._pool_bytes = draft, runner, pool_bytes
        decoder = draft.decoder
        self._digest = b"" if decoder is None else vocabulary_digest(decoder)
        self._drafters: dict[bytes, Drafter] = {}

    def __call__(self, target: Target) -> Drafter:
        digest = target.vocabulary_digest
        key = digest or target.vocab_size.to_bytes(8, "little")
        if key not in self._drafters:
            drafter = self._new(target, digest)
            if len(self._drafters) >= MAX_VOCABULARIES:
                raise ConfigError(f"this worker drafts for {MAX_VOCABULARIES} vocabularies already")
            self._drafters[key] = drafter
        return self._drafters[key]

    def _new(self, target: Target, digest: bytes) -> Drafter:
        version = Version(self._draft.name, self._draft, self._draft.weights, None, 1.0)
        draft = self._draft
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


def _tokenizer(text: str, digest: bytes) -> Tokenizer:
    """Raises ConfigError where it is not the one with this digest."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the package raises the bare class
        raise ConfigError(f"the target's tokenizer cannot be read: {error}") from None
    if vocabulary_digest(tokenizer) != digest:
        raise ConfigError("the target's tokenizer is not the one that it named")
    return tokenizer
