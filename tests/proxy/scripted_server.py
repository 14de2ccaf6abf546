"""Servers of each kind in this process, on a scripted model whose log-probabilities are a function
of all tokens before."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tinkercloud.proxy.upstream import Upstream, UpstreamAddress

Json = dict[str, Any]
END = 2
TOP = 2
BLOCK = 4  # tokens of a cache's block


@dataclass
class ScriptedModel:
    """end_at: the place at which the end-of-sequence token is the likeliest; nowhere else has it a
    chance. tied: places where two tokens are the likeliest. leader: with the probability
    `agreement` this model scores as that one."""

    num_tokens: int = 7
    end_at: int = 10**6
    tied: frozenset[int] = frozenset()
    leader: "ScriptedModel | None" = None
    agreement: float = 0.0
    _known: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def logprobs(self, before: Sequence[int]) -> list[float]:
        key = tuple(before)
        if key not in self._known:
            self._known[key] = self._logprobs(key)
        return self._known[key]

    def _logprobs(self, before: Sequence[int]) -> list[float]:
        coins = random.Random(str((list(before), self.num_tokens, self.leader is None)))
        if self.leader is not None and coins.random() < self.agreement:
            return self.leader.logprobs(before)
        scores = [2 * coins.random() for _ in range(self.num_tokens)]
        scores[END] = 9.0 if len(before) >= self.end_at else -math.inf
        if len(before) in self.tied:
            best = max(range(self.num_tokens), key=scores.__getitem__)
            scores[next(t for t in range(self.num_tokens) if t not in (best, END))] = scores[best]
        total = math.log(sum(map(math.exp, scores)))
        return [score - total for score in scores]

    def greedy(self, before: Sequence[int]) -> int:
        logprobs = self.logprobs(before)
        return max(range(self.num_tokens), key=logprobs.__getitem__)

    def sample(
        self, tokens: Sequence[int], num: int, draw: Callable[[list[int], list[float]], int]
    ) -> list[int]:
        sampled: list[int] = []
        while len(sampled) < num and END not in sampled:
            before = [*tokens, *sampled]
            sampled.append(draw(before, self.logprobs(before)))
        return sampled

    def alone(self, tokens: Sequence[int], num: int) -> list[int]:
        return self.sample(tokens, num, lambda before, _: self.greedy(before))


def keyed_draw(seed: int, temperature: float) -> Callable[[list[int], list[float]], int]:
    """Noise keyed by seed and place, as our server has it."""

    def draw(before: list[int], logprobs: list[float]) -> int:
        def noisy(token: int) -> float:
            uniform = random.Random(str((seed, len(before), token))).random()
            return logprobs[token] - temperature * math.log(-math.log(uniform))

        return max(range(len(logprobs)), key=noisy)

    return draw


def stream_draw(seed: int | None, bias: Json) -> Callable[[list[int], list[float]], int]:
    """Noise as it comes, as others have it; without a seed it is another one each time."""
    coins = random.Random(seed)

    def draw(_: list[int], logprobs: list[float]) -> int:
        weights = [math.exp(p + bias.get(str(t), 0)) for t, p in enumerate(logprobs)]
        return coins.choices(range(len(weights)), weights)[0]

    return draw


@dataclass
class ScriptedServer:
    """kind: one of SERVER_KINDS, or a server that is passed on to. drafts: llama-server drafts by
    itself. failing: answered with 500, and `failure`. chokes: scores beside cached tokens are.
    blocks: what "vllm-cached" has computed. requests: those of samples, path and body."""

    kind: str
    model: ScriptedModel
    failing: bool = False
    failure: str = "it fails"
    drafts: bool = False
    chokes: bool = False
    blocks: set[tuple[int, ...]] = field(default_factory=set)
    requests: list[tuple[str, Json]] = field(default_factory=list)
    coins: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def base_url(self) -> str:
        path = "/oai/api/v1" if self.kind == "tinkercloud" else "/v1"
        return f"http://{self.kind}-{id(self)}.test{path}"

    @property
    def address(self) -> UpstreamAddress:
        return UpstreamAddress(self.base_url)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer))

    def upstream(self) -> Upstream:
        return Upstream(self.address, self.http(), "scripted")

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.failing:
            return httpx.Response(500, json={"error": {"message": self.failure}})
        if request.url.path == "/slots" and self.kind == "llamacpp":
            return httpx.Response(200, json=[{"id": 0, "speculative": self.drafts}])
        if request.method == "GET":
            return httpx.Response(200, json=self.listed())
        path, body = request.url.path, json.loads(request.content)
        self.requests.append((path, body))
        answer = {"/generate": self.generate, "/oai/api/v1/verify": self.verify}
        if path == "/inference/v1/generate":
            if self.kind != "vllm-cached":
                return httpx.Response(403, json={"error": {"message": "restart with a flag"}})
            answer[path] = self.generate_cached
            if self.chokes and self.num_cached(body["token_ids"]):
                return httpx.Response(400, json={"error": {"message": "not JSON compliant: nan"}})
        whole = answer.get(path, self.completion)(body)
        if body.get("stream") and (path == "/generate" or body.get("return_token_ids")):
            return httpx.Response(200, content=self.streamed(self.events(whole)))
        return httpx.Response(200, json=whole)

    async def streamed(self, events: Sequence[Json]) -> AsyncIterator[bytes]:
        for event in events:
            await asyncio.sleep(0)
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def events(self, whole: Json) -> list[Json]:
        """As each kind has them: SGLang repeats what came before, ours ends with an event without a
        token."""
        if self.kind == "sglang":
            tokens, reason = whole["output_ids"], whole["meta_info"]["finish_reason"]
            reasons = [None] * (len(tokens) - 1) + [reason]
            metas = [
                {"completion_tokens": num, "finish_reason": reason}
                for num, reason in enumerate(reasons, 1)
            ]
            return [
                {"output_ids": tokens[: meta["completion_tokens"]], "meta_info": meta}
                for meta in metas
            ]
        choice = whole["choices"][0]
        events: list[Json] = [
            {"choices": [{"token_ids": [token], "finish_reason": None}]}
            for token in choice["token_ids"]
        ]
        if self.kind == "tinkercloud":
            events.append({"choices": [{}]})
        events[-1]["choices"][0]["finish_reason"] = choice["finish_reason"]
        return [*events, {"choices": [], "usage": whole["usage"]}]

    def listed(self) -> Json:
        owners = {"fake": "somebody", "vllm-cached": "vllm"}
        owner = owners.get(self.kind, self.kind)
        model = {"id": "scripted", "object": "model", "owned_by": owner, "max_model_len": 500}
        return {"object": "list", "data": [model]}

    def tokens_of(self, prompt: str | list[int]) -> list[int]:
        return prompt if isinstance(prompt, list) else [ord(letter) % 7 for letter in prompt]

    def drawn(self, tokens: list[int], num: int, sampling: Json, seed: int | None) -> list[int]:
        temperature = sampling.get("temperature", 1.0)
        if temperature == 0:
            return self.model.alone(tokens, num)
        if self.kind == "tinkercloud":
            draw = keyed_draw(0 if seed is None else seed, temperature)
        else:
            seed = self.coins.getrandbits(32) if seed is None else seed
            draw = stream_draw(seed, sampling.get("logit_bias") or {})
        return self.model.sample(tokens, num, draw)

    def completion(self, body: Json) -> Json:
        tokens = self.tokens_of(body["prompt"])
        sampled = self.drawn(tokens, body.get("max_tokens", 16), body, body.get("seed"))
        self.computed([*tokens, *sampled[:-1]])
        choice: Json = {"index": 0, "text": "".join(f"{token} " for token in sampled)}
        choice["finish_reason"] = "stop" if END in sampled else "length"
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": tokens, "token_ids": sampled}
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [None, *self.rows(tokens, 1)]
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(sampled)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def rows(self, tokens: list[int], first: int) -> list[Json]:
        """As vLLM has them, of tokens[first:]."""
        rows: list[Json] = []
        for i in range(first, len(tokens)):
            logprobs = self.model.logprobs(tokens[:i])
            shown = [tokens[i], *self.top(logprobs)]
            rows.append({str(t): {"logprob": max(logprobs[t], -1e30)} for t in shown})
        return rows

    def num_cached(self, tokens: list[int]) -> int:
        """Of the whole blocks before the last token."""
        places = range(BLOCK, len(tokens), BLOCK)
        return max((i for i in places if tuple(tokens[:i]) in self.blocks), default=0)

    def computed(self, tokens: list[int]) -> None:
        self.blocks |= {tuple(tokens[:i]) for i in range(BLOCK, len(tokens) + 1, BLOCK)}

    def generate_cached(self, body: Json) -> Json:
        """In the places of cached tokens is what would accept any draft."""
        tokens, params = body["token_ids"], body["sampling_params"]
        assert body["model"] == "scripted" and not params["skip_reading_prefix_cache"]
        sampled = self.drawn(tokens, params["max_tokens"], params, params.get("seed"))
        num = self.num_cached(tokens)
        self.computed([*tokens, *sampled[:-1]])
        left = [{str(token): {"logprob": 0.0}} for token in tokens[1 : num + 1]]
        return {
            "choices": [
                {"token_ids": sampled, "finish_reason": "stop" if END in sampled else "length"}
            ],
            "usage": {"prompt_tokens_details": {"cached_tokens": num}},
            "prompt_logprobs": [None, *left, *self.rows(tokens, num + 1)],
        }

    @staticmethod
    def top(logprobs: list[float]) -> list[int]:
        return sorted(range(len(logprobs)), key=lambda t: -logprobs[t])[:TOP]

    def generate(self, body: Json) -> Json:
        tokens, params = body["input_ids"], body["sampling_params"]
        sampled = self.drawn(tokens, params["max_new_tokens"], params, params.get("sampling_seed"))
        meta: Json = {"finish_reason": {"type": "stop" if END in sampled else "length"}}
        if body.get("return_logprob"):
            first = body["logprob_start_len"]
            rows = self.rows(tokens, first + 1)
            pairs = [[[e["logprob"], int(t), None] for t, e in row.items()] for row in rows]
            own = [
                [row[str(token)]["logprob"], token, None]
                for token, row in zip(tokens[first + 1 :], rows, strict=True)
            ]
            meta["input_token_logprobs"] = [[None, tokens[first], None], *own]
            meta["input_top_logprobs"] = [None, *pairs]
        return {"output_ids": sampled, "meta_info": meta}

    def verify(self, body: Json) -> Json:
        prompt, drafted = body["prompt"], body["drafted"]
        sampled = self.drawn(prompt, len(drafted) + 1, body, body.get("seed"))
        num = 0
        while num < len(drafted) and num < len(sampled) and sampled[num] == drafted[num]:
            num += 1
        tokens = sampled[: num + 1]
        ended = tokens[-1] == END
        return {
            "tokens": tokens,
            "logprobs": [-1.0] * len(tokens),
            "finish_reason": "stop" if ended else None,
        }
