"""What travels between a client and a target worker, as our own types."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud.speculative.remote import target_pb2 as pb
from tinkercloud.speculative.remote.messages import BadMessage

PROTOCOL = 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_FILE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What a client has to know of the model that verifies. digest: of config and weights.
    vocabulary_digest: of all tokens with their ids, b"" where it has no tokenizer. tokenizer: the
    files of its folder, as Hugging Face has them; {} at a client that did not ask for them."""

    name: str
    digest: bytes
    vocab_size: int
    vocabulary_digest: bytes = b""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def welcome(self, *, with_tokenizer: bool) -> pb.FromTarget:
        files = self.tokenizer if with_tokenizer else {}
        return pb.FromTarget(
            welcome=pb.Welcome(
                model=self.name, model_digest=self.digest, vocab_size=self.vocab_size,
                vocabulary_digest=self.vocabulary_digest,
                tokenizer=[
                    pb.File(name=name, content=zlib.compress(content))
                    for name, content in files.items()
                ],
            )
        )  # fmt: skip

    @classmethod
    def of(cls, welcome: pb.Welcome) -> "TargetModel":
        """Raises BadMessage."""
        return cls(
            welcome.model, welcome.model_digest, welcome.vocab_size, welcome.vocabulary_digest,
            {file.name: _unpacked(file) for file in welcome.tokenizer},
        )  # fmt: skip


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Those that there are."""
    paths = (folder / name for name in TOKENIZER_FILES)
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _unpacked(file: pb.File) -> bytes:
    """Raises BadMessage."""
    if file.name not in TOKENIZER_FILES:
        raise BadMessage("the target sends a file that is none of a tokenizer's")
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(file.content, MAX_FILE_BYTES)
    except zlib.error as error:
        raise BadMessage(f"{file.name} cannot be read: {error}") from None
    if unpacking.unconsumed_tail:
        raise BadMessage(f"{file.name} has more than {MAX_FILE_BYTES} bytes")
    return content
