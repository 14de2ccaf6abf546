"""llama-server's /completion over a made model: what each token is followed by is drawn once."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tinkercloud.chat.text_model import TextCodec
from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.distribution import Floats, distribution, log_softmax


@dataclass
class ScriptedLlama:
    """alias: the model that it says it serves. Of a token with which a character is incomplete
    it gives no log-probability, as llama-server. drafts: of tokens that it drafts it gives none
    either. served: how many requests it answers before it goes away."""

    codec: TextCodec
    size: int
    alias: str
    drafts: bool = False
    served: int = 10**6
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if len(self.bodies) > self.served:
            raise httpx.ConnectError("refused", request=request)
        if body["prompt"][-1] == self.size - 1:
            return httpx.Response(400, json={"error": {"message": "a prompt that it refuses"}})
        return httpx.Response(200, json=self._completion(body))

    def after(self, token: int) -> Floats:
        """(V,) log-probabilities, with a few likely tokens."""
        noise = np.random.Generator(np.random.Philox(key=token))
        logits = noise.normal(size=self.size)
        logits[noise.integers(0, self.size - 1, size=6)] += 14.0
        return log_softmax(logits)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        draws = np.random.Generator(np.random.Philox(key=body.get("seed", 0)))
        tokens, entries, text = [body["prompt"][-1]], list[dict[str, Any]](), b""
        for _ in range(body["n_predict"]):
            raw = self.after(tokens[-1])
            if forced := body.get("logit_bias"):
                tokens.append(forced[0][0])
                entries.append(self._entry(tokens[-1], raw, body, "logprob"))
                break
            shown, name = raw, "logprob"
            if body["temperature"]:
                shown = distribution(raw, _params(body))
            if body["post_sampling_probs"]:
                name = "prob"
            noise = draws.gumbel(size=self.size) if body["temperature"] else 0.0
            tokens.append(int(np.argmax(shown + noise)))
            text += self.codec.bytes_of(tokens[-1])
            if not ends_within_a_character(text):
                entries.append(self._entry(tokens[-1], shown, body, name))
        return {
            "tokens": tokens[1:],
            "model": self.alias,
            "stop_type": "limit",
            "completion_probabilities": entries,
        }

    def _entry(self, token: int, shown: Floats, body: dict[str, Any], name: str) -> dict[str, Any]:
        best = np.argsort(-shown, kind="stable")[: body["n_probs"]]
        if self.drafts:
            return {"id": token, "prob": 1.0, "top_probs": []}
        top = [{"id": int(one), name: _value(shown[one], name)} for one in best]
        return {"id": token, name: _value(shown[token], name), f"top_{name}s": top}


def ends_within_a_character(text: bytes) -> bool:
    """validate_utf8 of llama-server."""
    for i in range(1, min(4, len(text)) + 1):
        c = text[-i]
        if (c & 0xE0) == 0xC0:
            if i < 2:
                return True
        elif (c & 0xF0) == 0xE0:
            if i < 3:
                return True
        elif (c & 0xF8) == 0xF0 and i < 4:
            return True
    return False


def _value(logprob: float, name: str) -> float:
    value = float(np.exp(logprob)) if name == "prob" else float(logprob)
    return max(value, float(np.finfo(np.float32).min))  # JSON has no infinity


def _params(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        None, 0, body["temperature"], body["top_k"] or -1, body["top_p"], body["min_p"]
    )
