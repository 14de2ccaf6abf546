"""Drafts by a model with tokens of its own: nothing that is written changes, and most of them stand
where the model knows the text."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.numerics.drafting import Drafting
from tests.numerics.test_speculation import LAWS, Requests, all_same, mixture
from tests.numerics.tiny import VOCAB, Sampler, ask, open_store, random_prompt, write_tiny_model
from tests.speculative.streams import Tally, stream, written
from tests.tokenizers_made import TEXT, byte_level, words_in_pieces
from tinkercloud.decoding.sampler import Scan
from tinkercloud.embedded import runners
from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.blocks import BLOCK_TOKENS, BlockPool
from tinkercloud.embedded.draft_model import open_draft, tokenizer_pair
from tinkercloud.embedded.draft_network import DraftNetwork
from tinkercloud.embedded.model_drafter import ModelDrafter
from tinkercloud.embedded.models import ModelStore
from tinkercloud.embedded.runners import Batch, NativeRunner
from tinkercloud.embedded.speculation_choice import Asked, speculate
from tinkercloud.embedded.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.versions import Version
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafter import Drafter
from tinkercloud.weights.token_bytes import TokenBytes, TokenizerPair

needs_compiler = pytest.mark.skipif(
    runners.library() is None, reason="there is no C compiler here"
)


@pytest.fixture(scope="module")
def permuted_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its tokens numbered otherwise."""
    return renumbered(folder, tmp_path_factory.mktemp("permuted"))


@pytest.fixture(scope="module")
def merging_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny network, and a tokenizer with three merges of letters."""
    folder = write_tiny_model(tmp_path_factory.mktemp("merging"), seed=1)
    tokenizer = byte_level(VOCAB - 1)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def renumbered(folder: Path, target: Path) -> Path:
    """Token i becomes number[i]; the network says the same of it."""
    number = np.random.default_rng(7).permutation(VOCAB)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for rows in (model.model.embed_tokens.weight, model.lm_head.weight):
            rows[torch.from_numpy(number)] = rows.clone()
    model.save_pretrained(target)
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokenizer = Tokenizer(models.BPE({t: int(number[i]) for t, i in vocab.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    return target


def through_text(
    folder: Path, target: BaseModel, num_blocks: int = 400
) -> Callable[[int], TextModelDrafter]:
    def make(_: int) -> TextModelDrafter:
        draft = open_draft(folder, target, folder)
        pair = tokenizer_pair(draft, target)
        assert pair is not None
        pool = BlockPool(draft.config, draft.dtype, draft.device, num_blocks)
        version = Version("draft", draft, draft.weights, None, 1.0)
        return TextModelDrafter(version, NativeRunner(1), pool, pair)

    return make


# ---- in the engine


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("temperature", "more"), LAWS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_through_text_change_no_token_and_no_logprob(
    folder: Path, permuted_folder: Path, merging_folder: Path, batch: int, temperature: float,
    more: dict[str, object], dtype: torch.dtype,
) -> None:  # fmt: skip
    store = open_store(folder, dtype=dtype)
    base = store.publish(ask_base())
    requests = mixture(base, batch, temperature, use_eos=False, **more)
    plain = Sampler(store).run(requests)
    target = store.base("tiny")
    makers = (
        through_text(permuted_folder, target),
        through_text(merging_folder, target),
        through_text(permuted_folder, target, 5),  # without room
    )
    for make, most in itertools.product(makers, (1, 5)):
        drafting = Drafting(make, most)
        all_same(Sampler(store, speculate=drafting).run(requests), plain)
        assert drafting.speculation is not None
        told = drafting.speculation.snapshot()
        assert told["refused"] == {}, "drafts keep to the contract"


@needs_compiler
@pytest.mark.parametrize("most", [1, 5])
def test_a_draft_that_knows_what_the_target_says_is_mostly_right(
    folder: Path, permuted_folder: Path, most: int
) -> None:
    """The target's own network behind other numbers, at temperature 0. Its bytes are random: where
    a character begins and goes on as none, the draft has to wait."""
    store = open_store(folder)
    requests = mixture(store.publish(ask_base()), 3, 0.0, use_eos=False)
    drafting = Drafting(through_text(permuted_folder, store.base("tiny")), most)
    Sampler(store, speculate=drafting).run(requests)
    assert share(drafting) > 0.8


@needs_compiler
def test_drafts_through_text_stand_as_often_as_the_targets_law_says(
    folder: Path, permuted_folder: Path
) -> None:
    """T4 at temperature 1: they are fixed before the target draws, so p(x) is their chance."""
    store = open_store(folder)
    request = ask(random_prompt(20, 3), n=12, max_tokens=80, seed=3, use_eos=False)
    requests = {"0": (store.publish(ask_base()), request)}
    plain = Sampler(store).run(requests)
    drafting = Drafting(through_text(permuted_folder, store.base("tiny")), 3)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    assert drafting.policy.stops == []
    assert drafting.speculation is not None
    told = drafting.speculation.snapshot()["drafters"]["model"]
    assert told["calibration_tokens"] > 200
    assert abs(told["calibration_z"]) < 4
    assert share(drafting) > 0.3


def ask_base() -> object:
    from tinkercloud.core.types import FromBase

    return FromBase("tiny")


def share(drafting: Drafting) -> float:
    judged = sum(sum(told.num_judged) for told in drafting.policy.rounds)
    assert judged > 20
    return drafting.policy.num_accepted / judged


# ---- by a network that knows the text


class KnowingRunner:
    """A network that goes on with a known text, whatever tokens it was cut into so far.

    Its keys and values are the tokens themselves, in the blocks: told wrong blocks or places, or
    blocks with another's tokens, it does not know the text.
    """

    is_exact = True
    scan: Scan | None = None

    def __init__(self, tokenizer: TokenBytes, texts: list[bytes], vocab_size: int):
        self._tokenizer, self._texts, self._vocab_size = tokenizer, texts, vocab_size
        self._memory: dict[tuple[int, int], int] = {}
        self.num_rows = 0

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        self.num_rows += len(batch.tokens)
        for row, token in enumerate(batch.tokens.tolist()):
            self._memory[self._place(batch, row, int(batch.positions[row]))] = token
        return torch.stack([self._logits(batch, row) for row in batch.wanted.tolist()])

    def _logits(self, batch: Batch, row: int) -> Tensor:
        places = range(int(batch.positions[row]) + 1)
        tokens = [self._memory[self._place(batch, row, place)] for place in places]
        said = self._tokenizer.joined(tokens).removeprefix(b" ")
        logits = torch.zeros(self._vocab_size)
        for text in self._texts:
            if text.startswith(said) and len(text) > len(said):
                whole = self._tokenizer.encode_beginning(text)
                done = len(self._tokenizer.encode_beginning(said)) if said else 0
                exact = whole[:done] == tokens
                going = whole[done:] if exact else self._tokenizer.encode(text[len(said) :])
                logits[going[0]] = 20.0
        return logits

    @staticmethod
    def _place(batch: Batch, row: int, position: int) -> tuple[int, int]:
        table = batch.tables[batch.sequence[row]]
        return int(table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS

    def rest(self) -> None:
        pass


TOKENIZERS = {
    "bytes": byte_level(256),
    "few": byte_level(320),
    "many": byte_level(600),
    "pieces": words_in_pieces(),
}
DIFFERENT = [(a, b) for a, b in itertools.permutations(TOKENIZERS, 2)]
OTHER = TEXT[60:] + TEXT[:60]


class Scene:
    """A drafter whose network knows both texts; target and draft with tokenizers by their names."""

    def __init__(self, base: BaseModel, target: str, draft: str, num_blocks: int = 2000):
        self.target = TOKENIZERS[target]
        pair = TokenizerPair.of(self.target, TOKENIZERS[draft])
        vocab_size = TOKENIZERS[draft].get_vocab_size() + 8
        sized = replace(base, config=replace(base.config, vocab_size=vocab_size))
        pool = BlockPool(sized.config, sized.dtype, sized.device, num_blocks)
        version = Version("draft", sized, sized.weights, None, 1.0)
        self.runner = KnowingRunner(pair.draft, [TEXT.encode(), OTHER.encode()], vocab_size)
        self.drafter = TextModelDrafter(version, self.runner, pool, pair)
        self.pool = pool

    def written(self, most: int, num_prompt: int = 9) -> Tally:
        samples = []
        for i, text in enumerate((TEXT, OTHER)):
            tokens = self.target.encode(text).ids
            samples.append((stream(i, tokens[:num_prompt]), tokens[num_prompt:]))
        return written(self.drafter, samples, most)


@pytest.fixture(scope="module")
def tiny_base(folder: Path) -> BaseModel:
    return BaseModel.load("tiny", folder, folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("most", [1, 4, 8])
@pytest.mark.parametrize(("target", "draft"), DIFFERENT, ids=str)
def test_a_text_that_is_known_stands_whatever_the_tokens(
    tiny_base: BaseModel, target: str, draft: str, most: int
) -> None:
    """Code, prose, numbers and characters of several bytes; both samples side by side."""
    scene = Scene(tiny_base, target, draft)
    tally = scene.written(most)
    print(target, draft, most, tally.acceptance, tally.tokens_per_round)
    assert tally.acceptance > 0.6
    assert tally.tokens_per_round > 1 + 0.5 * most
    assert scene.pool.num_available == scene.pool.num_blocks


def test_a_confidence_is_the_chance_of_what_its_token_is_made_of(tiny_base: BaseModel) -> None:
    pass


def test_what_was_read_is_not_read_again(tiny_base: BaseModel) -> None:
    scene = Scene(tiny_base, "few", "many")
    scene.written(4)
    num_own = sum(len(TOKENIZERS["many"].encode(text).ids) for text in (TEXT, OTHER))
    assert scene.runner.num_rows < 3 * num_own
