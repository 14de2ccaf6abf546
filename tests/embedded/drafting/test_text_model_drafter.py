"""Drafts by a model with tokens of its own: no sampled token changes, and most of them are accepted
where the model knows the text."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

from tests.embedded.oracle_runner import KnowingRunner
from tests.embedded.speculative_engine import LAWS, Drafting, all_same, mixture
from tests.embedded.tiny import VOCAB, Sampler, ask, open_store, random_prompt, write_tiny_model
from tests.speculative.drafters.streams import Tally, stream, written
from tests.tokenizers_made import TEXT, byte_level, numbers, words_in_pieces
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.drafting.draft_model import open_draft, tokenizer_pair
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.drafter_setup import model_drafter
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Drafter, Stream
from tinkercloud.weights.token_bytes import TokenBytes, TokenizerPair

needs_compiler = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


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
        runner = NativeRunner(1)
        layout = runner.kv_layout(draft)
        pool = BlockPool(draft.config, draft.dtype, draft.device, num_blocks, layout)
        version = Version("draft", draft, draft.weights, None, 1.0)
        return TextModelDrafter(version, runner, pool, pair)

    return make


Makers = Sequence[Callable[[BaseModel], Callable[[int], TextModelDrafter]]]


@pytest.fixture(scope="module")
def makers(permuted_folder: Path, merging_folder: Path) -> Makers:
    """The target's network behind other numbers, the same without room, another with merges."""
    return (
        lambda target: through_text(permuted_folder, target),
        lambda target: through_text(permuted_folder, target, num_blocks=5),
        lambda target: through_text(merging_folder, target),
    )


# ---- in the engine


@pytest.fixture
def typed_store(folder: Path, dtype: torch.dtype) -> ModelStore:
    return open_store(folder, dtype=dtype)


@needs_compiler
@pytest.mark.parametrize(("temperature", "more"), LAWS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_through_text_change_no_token_and_no_logprob(
    typed_store: ModelStore, makers: Makers, batch: int, temperature: float, more: dict[str, object]
) -> None:
    base = typed_store.publish(FromBase("tiny"))
    requests = mixture(base, batch, temperature, use_eos=False, **more)
    plain = Sampler(typed_store).run(requests)
    target = typed_store.base("tiny")
    for make, most in itertools.product(makers, (1, 5)):
        drafting = Drafting(make(target), most)
        all_same(Sampler(typed_store, speculate=drafting).run(requests), plain)
        assert drafting.speculation is not None
        snapshot = drafting.speculation.snapshot()
        assert snapshot["refused"] == {}, "drafts keep to the contract"


@needs_compiler
@pytest.mark.parametrize("most", [1, 5])
def test_drafts_of_the_targets_own_text_are_mostly_accepted(
    folder: Path, permuted_folder: Path, most: int
) -> None:
    """The target's own network behind other numbers, at temperature 0. Its bytes are random: where
    a character begins and goes on as none, the draft has to wait."""
    store = open_store(folder)
    requests = mixture(store.publish(FromBase("tiny")), 3, 0.0, use_eos=False)
    drafting = Drafting(through_text(permuted_folder, store.base("tiny")), most)
    Sampler(store, speculate=drafting).run(requests)
    assert share(drafting) > 0.8


@needs_compiler
def test_drafts_through_text_are_accepted_as_often_as_the_targets_distribution_says(
    folder: Path, permuted_folder: Path
) -> None:
    """T4 at temperature 1: they are fixed before the target draws, so p(x) is their chance."""
    store = open_store(folder)
    request = ask(random_prompt(20, 3), n=12, max_tokens=80, seed=3, use_eos=False)
    requests = {"0": (store.publish(FromBase("tiny")), request)}
    plain = Sampler(store).run(requests)
    drafting = Drafting(through_text(permuted_folder, store.base("tiny")), 3)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    assert drafting.policy.stops == []
    assert drafting.speculation is not None
    snapshot = drafting.speculation.snapshot()["drafters"]["model"]
    assert snapshot["calibration_tokens"] > 200
    assert abs(snapshot["calibration_z"]) < 4
    assert share(drafting) > 0.3


def share(drafting: Drafting) -> float:
    judged = sum(sum(entry.num_judged) for entry in drafting.policy.rounds)
    assert judged > 20
    return drafting.policy.num_accepted / judged


# ---- by a network that knows the text


TOKENIZERS = {
    "bytes": byte_level(256),
    "few": byte_level(320),
    "many": byte_level(600),
    "pieces": words_in_pieces(),
}
DIFFERENT = list(itertools.permutations(TOKENIZERS, 2))
TOKENIZERS["numbers"] = numbers()
KNOWN = TEXT[: len(TEXT) // 3]
TEXTS = (KNOWN, KNOWN[60:] + KNOWN[:60])


class Scene:
    """A drafter whose network knows the texts; target and draft have tokenizers by their names."""

    def __init__(self, base: BaseModel, target: str, draft: str, texts: Sequence[str] = TEXTS):
        self.target = TOKENIZERS[target]
        pair = TokenizerPair.of(self.target, TOKENIZERS[draft])
        vocab_size = TOKENIZERS[draft].get_vocab_size() + 8
        sized = replace(base, config=replace(base.config, vocab_size=vocab_size))
        self.pool = BlockPool(sized.config, sized.dtype, sized.device, 200)
        self.version = version = Version("draft", sized, sized.weights, None, 1.0)
        self.runner = KnowingRunner(pair.draft, [text.encode() for text in texts], vocab_size)
        self.drafter = TextModelDrafter(version, self.runner, self.pool, pair)

    def stream(self, text: bytes, temperature: float = 1.0) -> Stream:
        begun = stream(7, TokenBytes(self.target).encode_beginning(text))
        begun = replace(begun, params=replace(begun.params, temperature=temperature))
        self.drafter.begin(begun)
        return begun

    def written(self, most: int, num_prompt: int = 9) -> Tally:
        """Both texts, side by side."""
        samples = []
        for i, text in enumerate(TEXTS):
            tokens = self.target.encode(text).ids
            samples.append((stream(i, tokens[:num_prompt]), tokens[num_prompt:]))
        return written(self.drafter, samples, most)


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return BaseModel.load("tiny", folder, folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize(("target", "draft"), DIFFERENT, ids=str)
def test_a_known_text_is_accepted_whatever_the_tokens(
    base: BaseModel, target: str, draft: str, most: int
) -> None:
    """Code, prose, numbers and characters of several bytes. Where its tokens are shorter than the
    target's, a draft's last one may not be whole."""
    scene = Scene(base, target, draft)
    tally = scene.written(most)
    assert tally.acceptance > (0.6 if most == 1 else 0.85)
    assert tally.tokens_per_round > 1 + 0.3 * most
    assert scene.pool.num_available == scene.pool.num_blocks


def test_what_was_read_is_not_read_again(base: BaseModel) -> None:
    """Besides what a round drafts, a row for each token of its own and some at words' ends."""
    scene = Scene(base, "bytes", "many")
    tally = scene.written(1)
    num_own = sum(len(TOKENIZERS["many"].encode(text).ids) for text in TEXTS)
    assert tally.rounds > 2 * num_own
    assert scene.runner.num_rows < 1.5 * tally.rounds + num_own


def test_with_other_weights_all_is_read_again(base: BaseModel) -> None:
    scene = Scene(base, "few", "many")
    begun = scene.stream(KNOWN[:25].encode())
    first = scene.drafter.propose([(begun, 1)])
    num_rows = scene.runner.num_rows
    scene.drafter.propose([(begun, 1)])
    assert scene.runner.num_rows == num_rows + 1
    scene.drafter.use(Version("newer", scene.version.base, scene.version.weights, None, 1.0))
    assert scene.drafter.propose([(begun, 1)]) == first
    assert scene.runner.num_rows == 2 * num_rows + 1


def test_a_token_made_of_several_has_the_product_of_their_probabilities(base: BaseModel) -> None:
    """Each of the draft's own has the probability 1/2."""
    scene = Scene(base, "many", "bytes")
    (draft,) = scene.drafter.propose([(scene.stream(KNOWN[:25].encode()), 4)])
    sizes = [len(TokenBytes(scene.target).of(token)) for token in draft.tokens]
    assert max(sizes) > 1
    assert draft.confidences == pytest.approx([0.5**size for size in sizes], rel=1e-3)


def test_of_tokens_made_of_one_the_first_has_its_probability(base: BaseModel) -> None:
    scene = Scene(base, "bytes", "many")
    (draft,) = scene.drafter.propose([(scene.stream(KNOWN[:25].encode()), 8)])
    tokenizer = TokenBytes(TOKENIZERS["many"])
    sizes = map(len, map(tokenizer.of, tokenizer.encode(KNOWN[25:].encode())))
    begins = set(itertools.accumulate(sizes, initial=0))
    expected = [0.5 if place in begins else 1.0 for place in range(len(draft.tokens))]
    assert 0.5 in expected and 1.0 in expected
    assert draft.confidences == pytest.approx(expected, rel=1e-3)


def test_confidences_follow_the_temperature(base: BaseModel) -> None:
    drafts = []
    for temperature in (0.0, 0.5, 1.0, 2.0):
        scene = Scene(base, "many", "few")
        begun = scene.stream(KNOWN[:25].encode(), temperature=temperature)
        drafts.append(scene.drafter.propose([(begun, 1)])[0])
    assert len({draft.tokens for draft in drafts}) == 1
    at_0, at_half, at_1, at_2 = (draft.confidences[0] for draft in drafts)
    assert at_0 == at_1
    assert at_half > 0.9 > at_1 > at_2


@pytest.mark.parametrize("tokenizer", ["many", "pieces"])
def test_inside_a_character_a_draft_continues_with_its_rest(
    base: BaseModel, tokenizer: str
) -> None:
    begin = KNOWN.index("🙂")
    whole = KNOWN[: begin + 1].encode()
    for missing in (1, 2, 3):
        scene = Scene(base, "bytes", tokenizer)
        begun = scene.stream(whole[:-missing])
        (draft,) = scene.drafter.propose([(begun, 8)])
        text = TokenBytes(scene.target).joined(draft.tokens)
        assert text.startswith(whole[-missing:]), "the rest of the character"
        assert (whole[:-missing] + text) == KNOWN.encode()[: len(whole) - missing + len(text)]


def test_a_draft_is_cut_into_tokens_as_after_what_is_there(base: BaseModel) -> None:
    """Alone, "345" would be 34, 5."""
    scene = Scene(base, "numbers", "bytes", ["12345"])
    begun = scene.stream(b"12")
    (draft,) = scene.drafter.propose([(begun, 2)])
    assert scene.target.encode("12345").tokens == ["12", "3", "45"]
    assert [*begun.tokens, *draft.tokens] == scene.target.encode("12345").ids


def test_tokens_that_are_there_stay_where_they_would_be_cut_otherwise(base: BaseModel) -> None:
    """A target may have written 1, 2 where its tokenizer says 12."""
    scene = Scene(base, "numbers", "bytes", ["12345"])
    begun = scene.stream(b"1")
    begun.tokens.append(scene.target.token_to_id("2"))
    (draft,) = scene.drafter.propose([(begun, 3)])
    assert TokenBytes(scene.target).joined(draft.tokens) == b"345"


def test_a_draft_of_another_character_is_dropped(base: BaseModel) -> None:
    scene = Scene(base, "bytes", "many")
    begun = scene.stream("unknown 🙂".encode()[:-2])
    assert scene.drafter.propose([(begun, 8)]) == [NO_DRAFT]


def test_a_text_longer_than_the_drafts_context_gets_no_drafts(base: BaseModel) -> None:
    longest = base.config.max_position_embeddings
    scene = Scene(base, "many", "bytes")
    begun = scene.stream(("one two " * longest).encode())
    assert len(begun.tokens) * 2 > longest
    assert scene.drafter.propose([(begun, 4)]) == [NO_DRAFT]


def test_an_empty_text_gets_no_drafts(base: BaseModel) -> None:
    """A token alone that is no text."""
    scene = Scene(base, "few", "bytes")
    begun = scene.stream(b"")
    begun.tokens.append(TOKENIZERS["few"].get_vocab_size() + 1)
    assert scene.drafter.propose([(begun, 4)]) == [NO_DRAFT]


# ---- which drafter a folder gets


def chosen(path: Path, target: BaseModel) -> Drafter:
    return model_drafter(open_draft(path, target, path), target, NativeRunner(1))


@needs_compiler
def test_the_tokenizer_decides_how_a_model_drafts(
    folder: Path, permuted_folder: Path, merging_folder: Path, base: BaseModel
) -> None:
    for path, kind in (
        (folder, ModelDrafter), (permuted_folder, TextModelDrafter),
        (merging_folder, TextModelDrafter),
    ):  # fmt: skip
        drafter = chosen(path, base)
        assert type(drafter) is kind
        assert drafter.is_coupled == (kind is ModelDrafter)


def test_rows_that_no_token_has_do_not_make_other_tokens(folder: Path, base: BaseModel) -> None:
    """Members of one family are filled up to different sizes."""
    filled = replace(base, config=replace(base.config, vocab_size=VOCAB + 60))
    assert tokenizer_pair(open_draft(folder, base, folder), filled) is None


@needs_compiler
def test_a_token_that_the_draft_has_no_row_for_gets_no_draft(folder: Path, base: BaseModel) -> None:
    drafter = chosen(folder, base)
    begun = stream(0, [5, VOCAB, 6])
    drafter.begin(begun)
    assert drafter.propose([(begun, 4)]) == [NO_DRAFT]


def test_a_draft_model_without_a_tokenizer_is_refused(
    folder: Path, base: BaseModel, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: put its own there, or a copy"):
        open_draft(bare, base, tmp_path)
    nameless = replace(base, decoder=None, config=replace(base.config, vocab_size=VOCAB + 1))
    with pytest.raises(ConfigError, match=r"tiny has no tokenizer\.json"):
        tokenizer_pair(open_draft(folder, base, folder), nameless)


def test_a_draft_model_whose_tokens_are_no_text_is_refused(
    permuted_folder: Path, base: BaseModel
) -> None:
    draft = open_draft(permuted_folder, base, permuted_folder)
    assert draft.decoder is not None
    draft.decoder.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="take a draft model of the same family"):
        tokenizer_pair(draft, base)


def test_a_draft_model_that_is_not_there_is_refused(base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        open_draft(tmp_path / "none", base, tmp_path)
