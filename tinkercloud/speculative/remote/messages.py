"""What travels between an engine and a draft worker, as our own types."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tinkercloud.core.types import SamplingParams
from tinkercloud.speculative.drafters.drafter import Draft, Stream
from tinkercloud.speculative.remote import draft_pb2 as pb

PROTOCOL = 1
MAX_TOKENIZER_BYTES = 64 * 1024**2
STEPS = 255  # of a confidence


class BadMessage(ValueError):
    """A message that does not follow the protocol; the text says how."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for. model_digest: of its config. vocabulary_digest: of all tokens
    with their ids (`weights.tokenizer`), b"" where it has no tokenizer. tokenizer: the text of its
    tokenizer.json; at a worker None until that was asked for."""

    model: str
    model_digest: bytes
    vocab_size: int
    vocabulary_digest: bytes = b""
    tokenizer: str | None = None

    def hello(self, *, with_tokenizer: bool = False) -> pb.ToWorker:
        packed = b""
        if with_tokenizer and self.tokenizer is not None:
            packed = zlib.compress(self.tokenizer.encode())
        return pb.ToWorker(
            hello=pb.Hello(
                protocol=PROTOCOL, model=self.model, model_digest=self.model_digest,
                vocabulary_digest=self.vocabulary_digest, vocab_size=self.vocab_size,
                tokenizer=packed,
            )
        )  # fmt: skip


def tokenizer_of(hello: pb.Hello) -> str | None:
    """Raises BadMessage."""
    if not hello.tokenizer:
        return None
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(hello.tokenizer, MAX_TOKENIZER_BYTES)
        if unpacking.unconsumed_tail:
            raise BadMessage(f"the tokenizer has more than {MAX_TOKENIZER_BYTES} bytes")
        return text.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise BadMessage(f"the tokenizer cannot be read: {error}") from None


def begin(stream: Stream, num_tokens: int) -> pb.Begin:
    return pb.Begin(
        id=stream.id, group=repr(stream.group).encode(), version=stream.version,
        epoch=stream.epoch, tokens=stream.tokens[:num_tokens], num_prompt=stream.num_prompt,
        sample_index=stream.sample_index, salt=_salt(stream.salt),
        params=wire_params(stream.params),
    )  # fmt: skip


def _salt(salt: str) -> bytes:
    """What tells salts apart without telling them."""
    return blake2b(salt.encode(), digest_size=16).digest() if salt else b""


def stream_of(message: pb.Begin, number: int, vocab_size: int) -> Stream:
    """number: the stream's id at the worker. Raises BadMessage."""
    if not 0 < message.num_prompt <= len(message.tokens):
        raise BadMessage(f"{message.num_prompt} of {len(message.tokens)} tokens are a prompt")
    check_tokens(message.tokens, vocab_size)
    return Stream(
        number, message.group, message.version, message.epoch, list(message.tokens),
        message.num_prompt, params_of(message.params), message.sample_index, message.salt.hex(),
    )  # fmt: skip


def wire_params(params: SamplingParams) -> pb.Params:
    return pb.Params(
        seed=params.seed, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
        min_p=params.min_p,
    )  # fmt: skip


def params_of(params: pb.Params) -> SamplingParams:
    """Raises BadMessage."""
    if not (params.temperature >= 0 and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1):
        raise BadMessage("sampling parameters are out of range")
    return SamplingParams(
        max_tokens=None, seed=params.seed, temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else -1, top_p=params.top_p, min_p=params.min_p,
    )  # fmt: skip


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises BadMessage."""
    if tokens and max(tokens) >= vocab_size:
        raise BadMessage(f"token {max(tokens)} of a vocabulary of {vocab_size}")


def branch(sample: int, base: int, before: Sequence[int], draft: Draft) -> pb.Branch:
    """`draft` after the tokens `before`, which are taken as certain."""
    confidences = [1.0] * len(before) + list(draft.confidences)
    return pb.Branch(
        id=sample, base=base, tokens=[*before, *draft.tokens],
        confidences=bytes(round(STEPS * min(max(c, 0.0), 1.0)) for c in confidences),
    )  # fmt: skip
