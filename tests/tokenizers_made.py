"""Small tokenizers of different kinds, made on the spot."""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinkercloud.weights.gguf_tokenizer import build_tokenizer

TEXT = (
    "def total(items):\n    return sum(item.price for item in items)\n\n"
    "The naïve café owner said: “Straße, 12345 + 67 = 12412”. 🙂👩‍👩‍👧 日本語は 難しい。\n"
    "one two three, one two three; the three items and the two owners of the one café\n"
) * 3


def byte_level(size: int, special: Sequence[str] = ("<eos>",)) -> Tokenizer:
    """Byte-level BPE with merges learned from TEXT, up to so many tokens; 256 has none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(name) for name in special])
    return tokenizer


def numbers() -> Tokenizer:
    """Byte-level BPE that cuts numbers into threes from the left, as Llama 3 does, and then joins
    12, 34 and 45, in this order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = dict.fromkeys([*letters, "12", "34", "45"])
    merges = [("1", "2"), ("3", "4"), ("4", "5")]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    threes = pre_tokenizers.Split(Regex(r"\d{1,3}"), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([threes, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(pieces: Sequence[str], *, adds_space: bool = True) -> Tokenizer:
    """BPE over pieces (U+2581 for spaces) and bytes, merged left to right; "<s>" begins texts."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": adds_space,
        }
    )


def words_in_pieces() -> Tokenizer:
    """SentencePiece: TEXT's letters, and its pairs and triples of letters within words."""
    text = TEXT.replace(" ", "\u2581")
    runs = [text[i : i + n] for n in (2, 3) for i in range(len(text) - n + 1)]
    known = dict.fromkeys(run for run in runs if "\n" not in run and "\u2581" not in run[1:])
    letters = dict.fromkeys(letter for letter in text if letter.isalpha() or letter == "\u2581")
    return sentencepiece([*letters, *known])


def metaspace(size: int) -> Tokenizer:
    """Unigram pieces of TEXT with U+2581 for spaces, one before every text; no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer
