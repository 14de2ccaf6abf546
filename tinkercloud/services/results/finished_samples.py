"""Samples as their clients got them, as long as the results are kept."""

from dataclasses import dataclass

from tinker_gmi.types import EncodedTextChunk, SampleRequest
from tinkercloud.core.types import SampleOutput
from tinkercloud.storage.finished_results import FinishedResults
from tinkercloud.storage.metadata import MetadataStorage, Sampler
from tinkercloud.wire.codec import decode_sample_output


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """prompt: its tokens; of images and other chunks nothing."""

    request_id: str
    sampler: Sampler
    request: SampleRequest
    output: SampleOutput
    finished_at: float

    @property
    def prompt(self) -> list[int]:
        chunks = self.request.prompt.chunks
        return [t for chunk in chunks if isinstance(chunk, EncodedTextChunk) for t in chunk.tokens]


class FinishedSamples:
    def __init__(self, results: FinishedResults, metadata: MetadataStorage):
        self._results = results
        self._metadata = metadata

    async def newest(self, user: str, limit: int) -> list[FinishedSample]:
        samples: list[FinishedSample] = []
        for request_id, sampled in await self._results.newest_samples(user, limit):
            sampler = await self._metadata.sampler(sampled.sampler_id, user)
            if sampler is not None:  # else its session is no more
                request = SampleRequest.model_validate_json(sampled.request)
                output = decode_sample_output(sampled.body)
                samples.append(
                    FinishedSample(request_id, sampler, request, output, sampled.finished_at)
                )
        return samples
