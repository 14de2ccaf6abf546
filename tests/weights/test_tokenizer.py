"""Tokenizer folders made from GGUF files: ids, round trips, templates, the cache."""

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tinkercloud.errors import ConfigError
from tinkercloud.weights.gguf_tokenizer import build_tokenizer
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

TEXTS = [
    "Hello, world!",
    "12345 + 67 = 12412; 3.14e10",
    "  two leading spaces, and   three inside",
    "tabs\t\tand\nnew\r\n\r\nlines  \n",
    "naïve café, straße, Ελληνικά, 日本語, עברית, 🙂👩‍👩‍👧",
    "don't I'LL we've",
    "def f(x):\n    return {x: x**2}  # code",
    "<|im_start|>user\nhi<|im_end|>\n",
    " ",
    "",
]
SPIECE = "\u2581"
PIECES = ["h", "e", "l", "o", "w", "r", "d", "a", "he", "ll", "hell", "hello", "lo", "or", "ld"]
PIECES += [SPIECE, SPIECE + "hello", "wo", SPIECE + "wo", "rl", SPIECE + "worl", SPIECE + "world"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, *PIECES],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i * 7 % 23) for i in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 0,
}
ALPHABET = [*"abcdefghij123", "Ġ", "ab", "Ġab", "12", "123", "<|end|>"]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ALPHABET,
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2", "12 3"],
    "tokenizer.ggml.token_type": [1] * (len(ALPHABET) - 1) + [3],
    "tokenizer.ggml.bos_token_id": len(ALPHABET) - 1,
}


@pytest.fixture(scope="module")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ensure_tokenizer_folder(smollm2_gguf, tmp_path_factory.mktemp("tokenizers"))
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


def test_smollm2_has_its_vocabulary(smollm2):
    assert smollm2.get_vocab_size() == 49152
    assert smollm2.token_to_id("<|im_start|>") == 1
    assert smollm2.token_to_id("<|im_end|>") == 2


@pytest.mark.slow
def test_smollm2_encodes_as_the_conversion_of_transformers(smollm2, smollm2_gguf):
    folder, name = str(smollm2_gguf.parent), smollm2_gguf.name
    converted = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    for text in TEXTS:
        assert smollm2.encode(text).ids == converted.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_texts_come_back_whole(text, smollm2):
    assert smollm2.decode(smollm2.encode(text).ids, skip_special_tokens=False) == text


def test_smollm2_splits_numbers_into_digits(smollm2):
    assert smollm2.encode("12345").tokens == list("12345")


def test_smollm2_adds_no_token_of_its_own(smollm2):
    assert smollm2.encode("").ids == []


def test_special_tokens_in_a_text_are_one_token(smollm2):
    assert smollm2.encode("<|im_start|>x<|im_end|>").ids[::2] == [1, 2]


def test_transformers_reads_the_folder_and_its_template(smollm2_folder, smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 49152)
    messages = [{"role": "user", "content": "2 + 2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == smollm2.encode(text).ids and ids.count(1) == 3


def test_a_byte_level_folder_is_written_without_transformers(smollm2_gguf, tmp_path):
    code = (
        "import sys, pathlib; from tinkercloud.weights.tokenizer import ensure_tokenizer_folder; "
        "ensure_tokenizer_folder(*map(pathlib.Path, sys.argv[1:])); "
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(smollm2_gguf), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_is_written_once_per_file(smollm2_gguf, tmp_path):
    file = tmp_path / "model.gguf"
    shutil.copyfile(smollm2_gguf, file)
    first = ensure_tokenizer_folder(file, tmp_path / "cache")
    assert first is not None
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert ensure_tokenizer_folder(file, tmp_path / "cache") == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    with file.open("ab") as stream:
        stream.write(bytes(32))
    assert ensure_tokenizer_folder(file, tmp_path / "cache") != first


def test_a_hugging_face_folder_is_its_own_tokenizer_folder(smollm2_folder, tmp_path):
    assert ensure_tokenizer_folder(smollm2_folder, tmp_path / "cache") == smollm2_folder
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert ensure_tokenizer_folder(tmp_path, tmp_path / "cache") is None


def test_a_file_that_cannot_be_converted_leaves_nothing_behind(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        ensure_tokenizer_folder(file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("default", ["123", "Ġab", "ab"]),
        ("gpt-2", ["123", "Ġab", "ab"]),
        ("smollm", ["1", "2", "3", "Ġab", "ab"]),
        ("qwen2", ["1", "2", "3", "Ġab", "ab"]),
    ],
)
def test_each_pre_tokenizer_splits_in_its_way(pre, tokens):
    text = "123 abab"
    pairs = build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": pre}).encode(text)
    assert pairs.tokens == tokens


def test_llama3_takes_three_digits_and_begins_with_bos():
    tokenizer = build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": "llama-bpe"})
    assert tokenizer.encode("123123").tokens == ["<|end|>", "123", "123"]
    assert tokenizer.encode("123", add_special_tokens=False).tokens == ["123"]


def test_the_file_decides_whether_texts_begin_with_bos():
    for wanted in (True, False):
        metadata = BYTE_LEVEL | {"tokenizer.ggml.add_bos_token": wanted}
        assert (build_tokenizer(metadata).encode("ab").tokens[0] == "<|end|>") is wanted


def test_qwen2_composes_characters_first():
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"], "Ã", "©"]
    metadata = BYTE_LEVEL | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "qwen2"}
    assert build_tokenizer(metadata).encode("e\u0301").tokens == ["Ã", "©"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported"),
        ({"tokenizer.ggml.tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["a z"]}, "do not fit"),
        ({"tokenizer.ggml.merges": ["az"]}, "do not fit"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "names a token twice"),
        ({"tokenizer.ggml.model": "llama"}, r"no tokenizer\.ggml\.scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_the_reason(change, reason):
    with pytest.raises(ConfigError, match=reason):
        build_tokenizer(BYTE_LEVEL | change)


@pytest.mark.parametrize(
    "text", ["hello world", "held", "wholloewo", "hell  oworld", "horde lloll", "é low 🙂"]
)
def test_sentencepiece_merges_by_score_like_the_plain_algorithm(text):
    encoded = build_tokenizer(SENTENCEPIECE).encode(text, add_special_tokens=False)
    assert encoded.tokens == plain_sentencepiece(text)


def test_sentencepiece_begins_with_bos_and_decodes_to_the_text():
    tokenizer = build_tokenizer(SENTENCEPIECE)
    ids = tokenizer.encode("hello é world").ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hello é world"


def plain_sentencepiece(text: str) -> list[str]:
    """Join the neighbours whose union scores best, leftmost first, until none is a token."""
    tokens = SENTENCEPIECE["tokenizer.ggml.tokens"]
    score = dict(zip(tokens, SENTENCEPIECE["tokenizer.ggml.scores"], strict=True))
    parts: list[str] = []
    for character in SPIECE + text.replace(" ", SPIECE):
        known = character in score
        parts += [character] if known else [f"<0x{b:02X}>" for b in character.encode()]
    while True:
        joined = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joined:
            return parts
        i = min(joined)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
