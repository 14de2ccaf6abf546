"""What a server behind the proxy is, and what can be asked of it: found by asking."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud.chat.text_model import TextCodec
from tinkercloud.errors import TinkercloudError, UpstreamAnswerInvalid
from tinkercloud.proxy.answers import json_list, json_object
from tinkercloud.proxy.drafters import GREEDY, DraftSession, DraftSource, TokenDrafter
from tinkercloud.proxy.server_kinds import SERVER_KINDS, VLLM_CACHED_SCORE, ServerKind
from tinkercloud.proxy.target import Target
from tinkercloud.proxy.text_drafter import TextDrafter
from tinkercloud.proxy.upstream import Upstream
from tinkercloud.proxy.verification import RoundRequest
from tinkercloud.speculative.drafters.drafter import Draft

PROBE = "def area(radius):\n    return 3.14 * radius ** 2  # 圆 números"


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of a server's /models. kind None: it cannot be asked by tokens."""

    model: str
    kind: ServerKind | None
    max_context: int | None
    entry: Mapping[str, Any]


async def listed(upstream: Upstream) -> Listed:
    """The model that the upstream's address names, or the first. Raises UpstreamUnreachable,
    UpstreamRefused, UpstreamAnswerInvalid."""
    entries = json_list(await upstream.get("models"), "data")
    named = upstream.address.model
    models = {
        entry["id"]: entry
        for entry in (json_object(each, "a model") for each in entries)
        if isinstance(entry.get("id"), str)
    }
    if not models or (named is not None and named not in models):
        names = ", ".join(list(models)[:16]) or "none"
        raise UpstreamAnswerInvalid(f"{upstream.name} has no model {named or ''}; it has: {names}")
    entry = models[named] if named is not None else next(iter(models.values()))
    longest = entry.get("max_model_len")
    return Listed(
        entry["id"],
        SERVER_KINDS.get(str(entry.get("owned_by"))),
        longest if isinstance(longest, int) and longest > 0 else None,
        entry,
    )


async def drafts_itself(upstream: Upstream) -> bool | None:
    """Whether a llama-server drafts, and verifies its drafts; None: it is no llama-server."""
    try:
        slots = await upstream.get_list("/slots")
    except TinkercloudError:
        return None
    said = [slot.get("speculative") for slot in slots if isinstance(slot, Mapping)]
    return True in said if said else None


async def has_vocabulary(upstream: Upstream, kind: ServerKind, codec: TextCodec) -> bool:
    """Whether a text has the same tokens there as here. Raises TinkercloudError."""
    if kind.name == "sglang":
        body = {"text": PROBE, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        scored = {"return_logprob": True, "logprob_start_len": 0}
        answer = await upstream.post("/generate", body | scored)
        meta = json_object(answer.get("meta_info"), "meta_info")
        places = json_list(meta, "input_token_logprobs")
        tokens = [place[1] for place in places if isinstance(place, list) and len(place) > 1]
    else:
        body = {"prompt": PROBE, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        choices = json_list(await upstream.post("completions", body), "choices")
        tokens = json_list(
            json_object(choices[0] if choices else None, "a choice"), "prompt_token_ids"
        )
    return tokens == codec.encode(PROBE, bos=True)


async def verifying_kind(upstream: Upstream, kind: ServerKind, codec: TextCodec) -> ServerKind:
    """How the server verifies best: vLLM from its cache, where it was started so that it can."""
    if kind.name != "vllm":
        return kind
    cached = SERVER_KINDS["vllm-cached"]
    prompt = tuple(codec.encode(PROBE, bos=True))
    try:
        await Target(upstream, cached, lambda token: True).scores(
            VLLM_CACHED_SCORE, RoundRequest(prompt[:-2], prompt[-2:], GREEDY)
        )
    except TinkercloudError:
        return kind
    return cached


async def why_not_verified(target: Target, codec: TextCodec) -> str | None:
    """Why the server cannot verify drafts; None: it can."""
    try:
        if not await has_vocabulary(target.upstream, target.kind, codec):
            return "its tokens are not those of --tokenizer"
        prompt = tuple(codec.encode(PROBE, bos=True))
        await target.verify(RoundRequest(prompt[:-2], prompt[-2:], GREEDY), random.Random(0))
    except TinkercloudError as error:
        return str(error)
    return None


class FoundDrafter:
    """A server that is looked at when it is first asked: it may not be there yet."""

    def __init__(self, upstream: Upstream, codec: TextCodec):
        self.name = upstream.name
        self._upstream = upstream
        self._codec = codec
        self._source: DraftSource | None = None

    async def source(self) -> DraftSource:
        """Raises TinkercloudError."""
        if self._source is None:
            model = await listed(self._upstream)
            self._upstream.model = model.model
            kind = model.kind
            if kind is not None and await has_vocabulary(self._upstream, kind, self._codec):
                self._source = TokenDrafter(self._upstream, kind)
            else:
                self._source = TextDrafter(self._upstream, self._codec)
        return self._source

    async def form(self) -> str:
        """How it is asked. Raises TinkercloudError."""
        return "tokens" if isinstance(await self.source(), TokenDrafter) else "text"

    def open(self) -> DraftSession:
        return self

    async def draft(self, request: RoundRequest) -> Draft:
        return await (await self.source()).open().draft(request)

    def close(self) -> None:
        """A server keeps nothing of a sample but what it caches."""
