"""Missing pieces from peers, rarest first, whoever dies meanwhile."""

import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import httpx

from tinkercloud.errors import ConfigError
from tinkercloud.pool.distribution.manifest import Manifest, parse_manifest
from tinkercloud.pool.distribution.peer import PORT_HEADER
from tinkercloud.pool.distribution.piece_store import PieceStore

CONNECTIONS = 6  # pieces that are requested at a time
REFRESH_S = 0.5  # between two looks at who has what
REPORT_S = 5.0
ALONE_S = 60.0  # without a new piece, after which a download gives up
MAX_DAMAGED = 3  # pieces of a peer, after which it is asked no more
MAX_PEERS = 64  # peers name others, whom a faulty one could make up without end
TIMEOUT_S = 30.0  # of a piece
LISTING_TIMEOUT_S = 2.0  # of what a peer has: all are asked one after the other


@dataclass(slots=True)
class Source:
    """A peer as it was last seen. damaged: pieces of it that were not what they should be."""

    address: str
    have: frozenset[int] = frozenset()
    in_flight: int = 0
    damaged: int = 0
    is_there: bool = False


def rarest_piece(
    missing: Iterable[int], holders: Mapping[int, int], rng: random.Random
) -> int | None:
    """One of the missing pieces that fewest peers hold, at random among these, so that peers who
    begin together fetch different ones; None where nobody holds any. holders: piece -> peers."""
    held = [piece for piece in missing if holders.get(piece)]
    if not held:
        return None
    fewest = min(holders[piece] for piece in held)
    return rng.choice([piece for piece in held if holders[piece] == fewest])


def fetch_manifest(addresses: Iterable[str], key: str | None, digest: str | None) -> Manifest:
    """From the first peer that answers. digest: what it has to be. Raises ConfigError."""
    reasons = []
    for address in addresses:
        try:
            with _client(key) as client:
                answer = client.get(f"http://{address}/manifest").raise_for_status()
        except httpx.HTTPError as error:
            reasons.append(f"{address}: {error}")
            continue
        manifest = parse_manifest(answer.content)
        if digest is not None and manifest.digest != digest:
            raise ConfigError(f"{address} has {manifest.name} as {manifest.digest}, not {digest}")
        return manifest
    raise ConfigError(f"no peer answers ({'; '.join(reasons)}); start `tinkercloud pool seed`")


@dataclass(slots=True)
class Download:
    """own_port: where this machine serves the pieces that it has; None: it does not."""

    store: PieceStore
    addresses: tuple[str, ...]
    key: str | None = None
    own_port: int | None = None
    report: Callable[[str], None] = lambda _: None
    _sources: dict[str, Source] = field(default_factory=dict)
    _requests: dict[Future[bytes | None], tuple[int, Source]] = field(default_factory=dict)

    def run(self) -> None:
        """Until the file is whole. Raises ConfigError where nobody has had what is missing for
        ALONE_S; what is here is kept."""
        rng = random.Random()
        for address in self.addresses:
            self._sources[address] = Source(address)
        refreshed, progressed, reported = 0.0, time.monotonic(), 0.0
        with _client(self.key) as client, ThreadPoolExecutor(CONNECTIONS) as executor:
            while not self.store.is_whole:
                if time.monotonic() >= refreshed + REFRESH_S:
                    self._refresh(client)
                    refreshed = time.monotonic()
                self._request_pieces(client, executor, rng)
                if self._collect():
                    progressed = time.monotonic()
                elif time.monotonic() > progressed + ALONE_S:
                    raise ConfigError(self._stuck())
                if time.monotonic() >= reported + REPORT_S:
                    self.report(self._progress())
                    reported = time.monotonic()
            for future in self._requests:
                future.cancel()
        self.report(self._progress())

    def _refresh(self, client: httpx.Client) -> None:
        for source in list(self._sources.values()):
            if source.damaged >= MAX_DAMAGED:
                continue
            headers = {} if self.own_port is None else {PORT_HEADER: str(self.own_port)}
            try:
                answer = client.get(
                    f"http://{source.address}/have", headers=headers, timeout=LISTING_TIMEOUT_S
                )
                listing = answer.raise_for_status().json()
                source.have = frozenset(map(int, listing["have"]))
                source.is_there = True
                self._add_peers(map(str, listing["peers"]))
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
                source.is_there = False

    def _add_peers(self, addresses: Iterable[str]) -> None:
        """Whom a peer knows, but for this machine itself."""
        for address in addresses:
            is_own = address.rpartition(":")[2] == str(self.own_port)
            if not is_own and len(self._sources) < MAX_PEERS:
                self._sources.setdefault(address, Source(address))

    def _request_pieces(
        self, client: httpx.Client, executor: ThreadPoolExecutor, rng: random.Random
    ) -> None:
        underway = {piece for piece, _ in self._requests.values()}
        missing = set(range(self.store.manifest.num_pieces)) - self.store.have - underway
        while len(self._requests) < CONNECTIONS:
            there = [source for source in self._sources.values() if self._is_good(source)]
            holders: dict[int, int] = {}
            for source in there:
                for piece in source.have & missing:
                    holders[piece] = holders.get(piece, 0) + 1
            piece = rarest_piece(missing, holders, rng)
            if piece is None:
                return
            source = min(
                (source for source in there if piece in source.have),
                key=lambda source: (source.in_flight, rng.random()),
            )
            source.in_flight += 1
            missing.discard(piece)
            request = executor.submit(_get_piece, client, source.address, piece)
            self._requests[request] = piece, source

    def _collect(self) -> bool:
        """Whether a piece came."""
        done, _ = wait(self._requests, timeout=0.1, return_when=FIRST_COMPLETED)
        if not self._requests:
            time.sleep(0.1)
        progressed = False
        for future in done:
            piece, source = self._requests.pop(future)
            source.in_flight -= 1
            data = future.result()
            if data is None:
                source.is_there = False  # until the next refresh
            elif self.store.write(piece, data):
                progressed = True
            else:
                source.damaged += 1
                self.report(f"{source.address} sent a damaged piece {piece}")
        return progressed

    def _is_good(self, source: Source) -> bool:
        return source.is_there and source.damaged < MAX_DAMAGED

    def _progress(self) -> str:
        manifest = self.store.manifest
        peers = sum(map(self._is_good, self._sources.values()))
        return f"{len(self.store.have)} of {manifest.num_pieces} pieces, {peers} peers"

    def _stuck(self) -> str:
        missing = sorted(set(range(self.store.manifest.num_pieces)) - self.store.have)
        return (
            f"nobody has had {len(missing)} pieces for {ALONE_S:.0f} s (piece {missing[0]} first); "
            "start a seeder again and repeat this command, which goes on from what is here"
        )


def _get_piece(client: httpx.Client, address: str, piece: int) -> bytes | None:
    try:
        return client.get(f"http://{address}/piece/{piece}").raise_for_status().content
    except httpx.HTTPError:
        return None


def _client(key: str | None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False)
