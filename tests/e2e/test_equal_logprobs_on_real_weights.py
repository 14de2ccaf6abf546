"""A token's log-probability is the same bits sampled, scored and trained: the official SDK, real
weights, and the server's own defaults (the number type of this machine, drafts, micro-batches).

The trainer scores by `forward` and `forward_backward`, the sampler by `compute_logprobs` and the
log-probabilities of prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tinker
from numpy.typing import NDArray

from tests.e2e.clients import MODEL, Client, logprobs_of
from tests.serving import Server
from tests.waiting import wait_for
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

RANKS = (4, 16, 33)
K = 3
PLAIN = {"temperature": 1.0, "stop": []}
SENTENCES = (
    "On day {} a lighthouse keeper writes down the weather: wind from the west, rain before noon, "
    "and one ship that never answers the lamp. ",
    "Item {} of the list was copied twice by the clerk, who then left for the harbour. ",
)
Ids = list[int]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Policy:
    """Weights that the trainer and the sampler have both."""

    trainer: Any
    sampler: Any


@dataclass(frozen=True)
class Case:
    """A request. policy: its number. samples: how many."""

    policy: int
    prompt: Ids
    seed: int
    samples: int = 2
    max_tokens: int = 12

    def ask(self, client: Client, policies: Sequence[Policy], **params: Any) -> Any:
        """The future of its response."""
        limits = {"max_tokens": self.max_tokens, "seed": self.seed}
        return policies[self.policy].sampler.sample(
            prompt=client.prompt(self.prompt),
            num_samples=self.samples,
            sampling_params=client.params(**PLAIN | limits | params),
            topk_sample_logprobs=K,
        )


@dataclass(frozen=True)
class Text:
    """A prompt and one of its samples. topk: (tokens, K) ids and log-probabilities."""

    case: Case
    tokens: Ids
    logprobs: Floats
    topk: tuple[NDArray[Any], NDArray[Any]]

    @property
    def whole(self) -> Ids:
        return [*self.case.prompt, *self.tokens]


def texts_of(case: Case, response: Any) -> list[Text]:
    return [
        Text(
            case,
            list(sample.tokens),
            np.array(sample.logprobs),
            (sample.topk_logprobs_np.token_ids, sample.topk_logprobs_np.logprobs),
        )
        for sample in response.sequences
    ]


def sampled(
    client: Client, policies: Sequence[Policy], cases: Sequence[Case], **params: Any
) -> list[Text]:
    """All at once."""
    futures = [case.ask(client, policies, **params) for case in cases]
    pairs = zip(cases, futures, strict=True)
    return [text for case, future in pairs for text in texts_of(case, future.result())]


def scored(client: Client, policies: Sequence[Policy], texts: Sequence[Text]) -> list[Floats]:
    """The sampler's log-probabilities of each text's tokens after the first, all at once."""
    futures = [
        policies[text.case.policy].sampler.compute_logprobs(client.prompt(text.whole))
        for text in texts
    ]
    return [np.array(future.result()[1:], np.float64) for future in futures]


def trained(
    client: Client, policies: Sequence[Policy], texts: Sequence[Text], *, backward: bool = False
) -> list[Floats]:
    """The trainer's: one call for each policy, all at once."""
    numbers = sorted({text.case.policy for text in texts})
    futures = {}
    for number in numbers:
        data = [client.supervised(text.whole) for text in texts if text.case.policy == number]
        trainer = policies[number].trainer
        call = trainer.forward_backward if backward else trainer.forward
        futures[number] = call(data, "cross_entropy")
    found: dict[int, Iterator[Floats]] = {}
    for number, future in futures.items():
        output = future.result()
        found[number] = iter([logprobs_of(output, i) for i in range(len(output.loss_fn_outputs))])
    return [next(found[text.case.policy]) for text in texts]


def assert_as_sampled(texts: Sequence[Text], logprobs: Sequence[Floats]) -> None:
    for text, found in zip(texts, logprobs, strict=True):
        assert len(found) == len(text.whole) - 1
        assert np.array_equal(text.logprobs, found[-len(text.tokens) :]), text.case


def assert_equal(left: Sequence[Floats], right: Sequence[Floats]) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one, other)


def assert_same_samples(left: Sequence[Text], right: Sequence[Text]) -> None:
    assert [text.tokens for text in left] == [text.tokens for text in right]
    assert_equal([text.logprobs for text in left], [text.logprobs for text in right])


# ---- a server, models that differ, and a crowd of requests


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> Ids:
    written = "".join(SENTENCES[i % 2].format(i) for i in range(60))
    return tokenizer.encode(written)


@pytest.fixture(scope="module")
def client(official: Client) -> Client:
    return official


@pytest.fixture(scope="module")
def policies(client: Client, text: Ids) -> list[Policy]:
    """The base, with a fresh adapter as its trainer, and adapters that have taken two steps."""
    made = [Policy(client.model(rank=8), client.base_sampler())]
    for rank in RANKS:
        model = client.model(rank=rank, seed=rank)
        for _ in range(2):
            client.train(model, [client.supervised(text[rank : rank + 40])], 3e-3)
        made.append(Policy(model, model.save_weights_and_get_sampling_client().result()))
    return made


@pytest.fixture(scope="module")
def cases(text: Ids) -> list[Case]:
    """Lengths about the 16 tokens of a block and the 64 positions of a unit of attention, then
    prompts that are computed in pieces of 512. Most begin alike, two have nothing in common."""
    random = np.random.default_rng(0).integers(0, 40_000, 150).tolist()
    prompts = [text[:1], text[:16], text[:63], text[:64], text[:65], random[:17], random[17:]]
    policies = range(1 + len(RANKS))
    pairs = [(p, prompt) for p in policies for i, prompt in enumerate(prompts) if (p + i) % 2]
    pairs += [(1, text[:530]), (2, text[:530]), (2, text[:1100])]
    return [
        Case(policy, prompt, seed, samples=1 + seed % 2, max_tokens=5 + seed % 7)
        for seed, (policy, prompt) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def crowd(client: Client, policies: list[Policy], cases: list[Case]) -> list[Text]:
    return sampled(client, policies, cases)


def some(texts: Sequence[Text]) -> list[Text]:
    """One sample of a few requests of every kind, the longest among them."""
    firsts = {text.case.seed: text for text in reversed(texts)}
    return [firsts[seed] for seed in sorted(firsts) if seed % 5 == 1 or seed == max(firsts)]


# ---- what is promised


def test_models_of_the_test_differ(
    client: Client, policies: list[Policy], crowd: list[Text]
) -> None:
    whole = crowd[0].whole
    prompts = [policy.sampler.compute_logprobs(client.prompt(whole)) for policy in policies]
    assert len({tuple(future.result()[1:]) for future in prompts}) == len(policies)


def test_sampled_in_a_crowd_scored_and_trained_in_others(
    client: Client, policies: list[Policy], crowd: list[Text]
) -> None:
    scores = scored(client, policies, crowd)
    assert_as_sampled(crowd, scores)
    assert_equal(trained(client, policies, crowd), scores)  # prompts as well


@pytest.mark.slow
def test_alone(client: Client, policies: list[Policy], crowd: list[Text]) -> None:
    for text in some(crowd):
        drawn = sampled(client, policies, [text.case])
        assert_same_samples(drawn, [other for other in crowd if other.case == text.case])
        scores = scored(client, policies, [text])
        assert_as_sampled([text], scores)
        assert_equal(trained(client, policies, [text]), scores)


@pytest.mark.slow
def test_while_others_train_and_sample(
    client: Client, policies: list[Policy], cases: list[Case], crowd: list[Text]
) -> None:
    few = some(crowd)
    futures = [case.ask(client, policies) for case in cases[::3]]
    assert_as_sampled(few, trained(client, policies, few, backward=True))
    pairs = zip(cases[::3], futures, strict=True)
    again = [text for case, future in pairs for text in texts_of(case, future.result())]
    numbers = {case.seed for case in cases[::3]}
    assert_same_samples(again, [text for text in crowd if text.case.seed in numbers])


@pytest.mark.slow
def test_every_way_to_score_a_prompt(
    client: Client, policies: list[Policy], crowd: list[Text]
) -> None:
    """Its tokens, the likeliest K, named tokens, and tokens drawn anew."""
    for text in some(crowd):
        whole, first = text.whole, len(text.case.prompt)
        targets = np.stack([whole[1:], whole[:-1]], axis=1)
        response = (
            policies[text.case.policy]
            .sampler.sample(
                prompt=client.prompt(whole),
                num_samples=1,
                sampling_params=client.params(max_tokens=1, temperature=1.0),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=K,
                target_prompt_logprobs=tinker.TensorData.from_numpy(targets),
                prompt_alt_tokens_k=2,
            )
            .result()
        )
        assert np.array_equal(text.logprobs, response.prompt_logprobs_np[first:])
        named = response.target_prompt_logprobs.to_numpy()
        assert np.array_equal(named[:, 0], response.prompt_logprobs_np[1:])
        ids, likeliest = text.topk
        assert np.array_equal(ids, response.topk_prompt_logprobs_np.token_ids[first:])
        assert np.array_equal(likeliest, response.topk_prompt_logprobs_np.logprobs[first:])
        drawn = response.prompt_alt_tokens
        again = (
            policies[text.case.policy]
            .sampler.sample(
                prompt=client.prompt(whole),
                num_samples=1,
                sampling_params=client.params(max_tokens=1),
                target_prompt_logprobs=drawn.tokens,
            )
            .result()
        )
        assert np.array_equal(again.target_prompt_logprobs.to_numpy(), drawn.logprobs.to_numpy())


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9, "top_k": 40}],
    ids=str,
)
def test_with_other_parameters_the_models_own_logprobs(
    client: Client, policies: list[Policy], cases: list[Case], params: dict[str, float]
) -> None:
    """What a sample reports is of the distribution that it was drawn from; at temperature 0 the
    model's own."""
    few = cases[2::5]
    texts = sampled(client, policies, few, **params)
    alone = [text for case in few[:1] for text in sampled(client, policies, [case], **params)]
    assert_same_samples(alone, texts[: len(alone)])
    scores = scored(client, policies, texts)
    assert_equal(trained(client, policies, texts), scores)
    if params["temperature"] == 0:
        assert_as_sampled(texts, scores)


def test_drafted_tokens(client: Client, server: Server, policies: list[Policy]) -> None:
    """Of a text that goes in circles; the second and third time it was seen before."""
    circle = Case(0, list(range(100, 120)) * 4, seed=0, samples=1, max_tokens=120)
    greedy = [sampled(client, policies, [circle], temperature=0.0) for _ in range(3)]
    adapted = Case(2, circle.prompt, seed=1, samples=4, max_tokens=40)
    texts = [text for one in greedy for text in one] + sampled(client, policies, [adapted])
    scores = scored(client, policies, texts)
    assert_as_sampled(texts, scores)
    assert_equal(trained(client, policies, texts), scores)

    def num_accepted_so_far() -> int:
        """Whether a round of drafts pays is judged by times; some are tried in any case."""
        assert_same_samples(sampled(client, policies, [circle], temperature=0.0), greedy[0])
        return num_accepted(server)

    # The figures come about once a second.
    wait_for("drafted tokens were accepted", num_accepted_so_far, poll_s=0.1)


def num_accepted(server: Server) -> int:
    """Drafted tokens that were accepted."""
    with server.http() as http:
        models = http.get("/health").json().get("speculation", {})
    drafters = models.get(MODEL, {}).get("drafters", {}).values()
    return sum(depth["accepted"] for drafter in drafters for depth in drafter["depths"])


@pytest.mark.slow
def test_after_a_restart_of_the_server(
    client: Client, server: Server, policies: list[Policy], crowd: list[Text]
) -> None:
    """The last test of the file: what was sampled before is scored, trained and sampled anew."""
    named = [policy.trainer.save_weights_for_sampler("kept").result().path for policy in policies]
    states = [policy.trainer.save_state("kept").result().path for policy in policies]
    server.restart()
    later = Client.connect(tinker, server)
    try:
        loaded = [
            Policy(
                later.service.create_training_client_from_state(state).result(),
                later.service.create_sampling_client(model_path=path).result(),
            )
            for path, state in zip(named, states, strict=True)
        ]
        few = some(crowd)
        scores = scored(later, loaded, few)
        assert_as_sampled(few, scores)
        assert_equal(trained(later, loaded, few), scores)
        again = sampled(later, loaded, [text.case for text in few])
        numbers = [text.case.seed for text in few]
        kept = [text for number in numbers for text in crowd if text.case.seed == number]
        assert_same_samples(again, kept)
    finally:
        later.close()
