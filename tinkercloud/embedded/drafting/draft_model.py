"""Files of a model as a draft model, and whether its tokens are the target's."""

from pathlib import Path

from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.errors import ConfigError
from tinkercloud.weights.token_bytes import TokenizerPair
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder


def open_draft(path: Path, target: BaseModel, cache_dir: Path) -> BaseModel:
    """path: a Hugging Face folder or GGUF file. Raises ConfigError where there is no model, or no
    tokenizer with it."""
    if not path.exists():
        raise ConfigError(f"--speculate model:{path}: there is no such file or folder")
    tokenizer = ensure_tokenizer_folder(path, cache_dir)
    if tokenizer is None:
        raise ConfigError(
            f"the draft model {path} has no tokenizer.json: put its own there, or a copy of "
            f"{target.name}'s if it was trained on the same tokens"
        )
    return BaseModel.load(f"draft {path}", path, tokenizer, target.dtype, target.device)


def tokenizer_pair(draft: BaseModel, target: BaseModel) -> TokenizerPair | None:
    """For translating drafts through text; None where their tokens are the same. Raises ConfigError
    where they differ and cannot be read as text."""
    if target.decoder is None and draft.config.vocab_size == target.config.vocab_size:
        return None  # nothing says that they differ, and a wrong draft costs time only
    if draft.decoder is None or target.decoder is None:
        without = draft if draft.decoder is None else target
        raise ConfigError(f"{without.name} has no tokenizer.json, which drafts through text need")
    if draft.decoder.get_vocab() == target.decoder.get_vocab():
        return None
    try:
        return TokenizerPair.of(target.decoder, draft.decoder)
    except ConfigError as error:
        raise ConfigError(
            f"{draft.name} has other tokens than {target.name}, and drafts cannot go through text: "
            f"{error}; take a draft model of the same family"
        ) from None


def draft_pool(draft: BaseModel, runner: Runner, num_bytes: int) -> BlockPool:
    """Of that size, or of one sequence of the longest length where that takes more."""
    layout = runner.kv_layout(draft)
    num_blocks = max(
        num_bytes // BlockPool.bytes_per_block(draft.config, draft.dtype, layout),
        blocks_for(draft.config.max_position_embeddings),
    )
    return BlockPool(draft.config, draft.dtype, draft.device, num_blocks, layout)
