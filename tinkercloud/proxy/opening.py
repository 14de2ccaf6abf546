"""A proxy from its options: its connections, and what its servers turn out to be."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import ConfigError, TinkercloudError
from tinkercloud.proxy.discovery import (
    PROBE,
    FoundDrafter,
    Listed,
    drafts_itself,
    listed,
    verifying_kind,
    why_not_verified,
)
from tinkercloud.proxy.drafters import DraftPool, DraftSource, Together
from tinkercloud.proxy.eligibility import ServerDefaults
from tinkercloud.proxy.service import ProxyLimits, ProxyService, Speculation
from tinkercloud.proxy.speculation import Clock, Speculator
from tinkercloud.proxy.target import Target
from tinkercloud.proxy.upstream import PublicOnly, Upstream, UpstreamAddress

CONNECT_S, ANSWER_S = 10.0, 600.0
MAX_CONNECTIONS = 512
READS_AGAIN = (
    "it reads the whole prompt again for each draft; vLLM that is started with --enable-scale-out "
    "--enable-prompt-tokens-details, on a CPU with --block-size 32 too, reads the last block"
)
COULD_DRAFT = (
    "llama-server drafts by itself where it is started so: in a pool's file by `draft: suffix`"
)

Say = Callable[[str], None]
Transport = Callable[[], httpx.AsyncBaseTransport]


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """tokenizer: a Hugging Face folder with the target's tokenizer.json; None: every request is
    passed on. local: drafters that are no servers."""

    target: UpstreamAddress
    drafts: tuple[UpstreamAddress, ...] = ()
    local: tuple[DraftSource, ...] = ()
    tokenizer: Path | None = None
    target_key: str | None = None
    draft_key: str | None = None
    most_drafted: int = 16
    together: Together = "race"
    draft_timeout_s: float = 2.0
    allow_private: bool = False
    limits: ProxyLimits = field(default_factory=ProxyLimits)


@asynccontextmanager
async def opened(
    options: ProxyOptions,
    say: Say,
    transport: Transport | None = None,
    clock: Clock = time.perf_counter,
) -> AsyncGenerator[ProxyService]:
    """transport: in place of HTTP's own. clock: by which requests are timed, in seconds. Raises
    ConfigError where the target is not there or the tokenizer cannot be read."""
    async with AsyncExitStack() as stack:

        async def client(key: str | None) -> httpx.AsyncClient:
            inner = transport() if transport else _transport(options.allow_private)
            return await stack.enter_async_context(_client(inner, key))

        upstream = Upstream(options.target, await client(options.target_key))
        try:
            target = await listed(upstream)
        except TinkercloudError as error:
            raise ConfigError(f"the target cannot be used: {error}") from None
        upstream.model = target.model
        to_drafts = await client(options.draft_key)
        drafts = [Upstream(address, to_drafts) for address in options.drafts]
        speculation, reason = await _speculation(options, upstream, target, drafts, clock)
        if speculation is None:
            say(f"every request is passed on to {upstream.name}: {reason}")
        else:
            kind = speculation.speculator.target.kind
            say(f"drafts are verified by {target.model} at {upstream.name} ({kind.name})")
            for source in speculation.speculator.drafters.sources:
                say(await _described(source))
            if kind.computes_prompt:
                say(READS_AGAIN)
        yield ProxyService(upstream, target, speculation, reason, options.limits)


def _transport(allow_private: bool) -> httpx.AsyncBaseTransport:
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64)
    inner = httpx.AsyncHTTPTransport(limits=limits)
    return inner if allow_private else PublicOnly(inner)


def _client(transport: httpx.AsyncBaseTransport, key: str | None) -> httpx.AsyncClient:
    """Proxies of the environment are not asked: they would see an address before it is checked."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    return httpx.AsyncClient(transport=transport, headers=headers, timeout=timeout, trust_env=False)


async def _speculation(
    options: ProxyOptions,
    upstream: Upstream,
    target: Listed,
    drafts: Sequence[Upstream],
    clock: Clock,
) -> tuple[Speculation | None, str]:
    """None with the reason. Raises ConfigError."""
    if target.kind is None:
        itself = await drafts_itself(upstream)
        if itself:
            return None, "llama-server drafts by itself, and verifies each draft in one pass"
        hint = "" if itself is None else f"; {COULD_DRAFT}"
        return None, f"its API gives no scores of drafted tokens{hint}"
    if options.tokenizer is None:
        return None, "--tokenizer names no folder with its tokenizer"
    if not drafts and not options.local:
        return None, "there is no --draft"
    text = await asyncio.to_thread(_text_model, target.model, options.tokenizer)
    defaults = ServerDefaults()
    if not target.kind.is_seeded:
        defaults = ServerDefaults.of_folder(options.tokenizer)
        if defaults.repetition_penalty != 1:
            return None, "its generation_config.json has a repetition penalty, which no score shows"
    end_tokens = defaults.end_tokens

    def is_text(token: int) -> bool:
        return token not in end_tokens and bool(text.codec.bytes_of(token))

    kind = await verifying_kind(upstream, target.kind, text.codec)
    verifier = Target(upstream, kind, is_text)
    reason = await why_not_verified(verifier, text.codec)
    if reason is not None:
        return None, reason
    sources = [*options.local, *(FoundDrafter(each, text.codec) for each in drafts)]
    pool = DraftPool(sources, options.together, options.draft_timeout_s)
    speculator = Speculator(verifier, pool, options.most_drafted, clock)
    try:
        await speculator.measure(tuple(text.codec.encode(PROBE, bos=True)))
    except TinkercloudError as error:
        return None, str(error)
    return Speculation(speculator, text, defaults), ""


def _text_model(name: str, folder: Path) -> TextModel:
    """Raises ConfigError."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json")
    return TextModel.of(ServedModel(name, "", 0, 0, 0, folder, (), "float32"))


async def _described(source: DraftSource) -> str:
    if not isinstance(source, FoundDrafter):
        return f"drafts from {source.name}"
    try:
        return f"drafts from {source.name}, by {await source.form()}"
    except TinkercloudError as error:
        return f"no drafts from {source.name} yet: {error}"
