"""A GGUF file with a tokenizer and next to no weights: what a server reads of a pool's model."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.tokenizers_made import byte_level

SIZE = 300
EOS = "<eos>"


def write_small_gguf(path: Path) -> Path:
    tokenizer = json.loads(byte_level(SIZE - 1, (EOS,)).to_str())["model"]
    tokens = [*sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__), EOS]
    control = gguf.TokenType.CONTROL
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(1)
    writer.add_context_length(2048)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token == EOS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
