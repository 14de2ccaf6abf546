"""Drafts without a server: a sample continues as its own text did before."""

import itertools

from tinkercloud.core.types import SamplingParams
from tinkercloud.proxy.drafters import DraftSession
from tinkercloud.proxy.verification import RoundRequest
from tinkercloud.speculative.drafters.drafter import Draft, Stream
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter


class SuffixSource:
    """Samples learn from themselves alone: one client's text is not in another's drafts."""

    name = "suffix"

    def __init__(self) -> None:
        self.drafter = SuffixDrafter()
        self.numbers = itertools.count()

    def open(self) -> DraftSession:
        return _SuffixSession(self)


class _SuffixSession:
    def __init__(self, source: SuffixSource):
        self._source = source
        self._stream: Stream | None = None

    async def draft(self, request: RoundRequest) -> Draft:
        drafter, stream = self._source.drafter, self._stream
        if stream is None:
            number, tokens = next(self._source.numbers), [*request.prompt]
            params = SamplingParams(1, 0, request.sampling.temperature)
            stream = Stream(number, number, "", 0, tokens, len(tokens), params, 0)
            self._stream = stream
            drafter.begin(stream)
        elif new := request.prompt[len(stream.tokens) :]:
            stream.tokens.extend(new)
            drafter.observe(stream, len(new))
        return drafter.propose([(stream, request.num_tokens)])[0]

    def close(self) -> None:
        if self._stream is not None:
            self._source.drafter.end(self._stream)
