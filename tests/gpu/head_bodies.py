"""What tests of draft heads do, as functions of the device; tests/embedded runs them on a CPU.

Axes: M rows of a pass, N tokens, L layers, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.embedded.decode_scene import Scene, version
from tests.embedded.speculative_engine import Drafting, untaught_head
from tests.embedded.tiny import ask, random_prompt
from tests.gpu.stream_bodies import RANKS, Load, engine_of
from tinkercloud.core.types import SampleOutput
from tinkercloud.embedded.draft_training.capture import SequenceMetadata, capture_sequence
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.forward.batch import Batch, SequenceRows, ragged
from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.cuda_streams import Streams
from tinkercloud.speculative.drafters.drafter import Draft, Stream

LAYERS = (1, 3)  # of three: a block's output, and what follows the final norm
LENGTHS = (40, 17, 33, 90, 5)
DRAFTED = 3


def scene(base: BaseModel) -> Scene:
    """Five sequences of two adapters and the base between."""
    first, second = version(base, 4, 1), version(base, 8, 2)
    return Scene.of([(first, 2), (version(base, None, 0), 1), (second, 2)], LENGTHS)


def mixed(base: BaseModel) -> tuple[Batch, BlockPool]:
    """Prefill, decode and verify rows in one batch."""
    held, generator = scene(base), np.random.default_rng(3)
    versions = [one for one, count in held.versions for _ in range(count)]
    parts = []
    for i, (start, count) in enumerate(((40, 4), (17, 1), (0, 21), (90, 1), (5, 30))):
        tokens = generator.integers(0, base.config.vocab_size, count).tolist()
        blocks = held.tables[i, : blocks_for(start + count)].tolist()
        parts.append(SequenceRows(versions[i], tokens, start, blocks, 1))
    return ragged(parts), held.pool


def of_mixed(base: BaseModel, runner: Runner, layers: tuple[int, ...] = LAYERS) -> Tensor:
    """States (M, L, D) of such a batch."""
    runner.capture(base, layers)
    with torch.inference_mode():
        runner.forward(*mixed(base))
    return runner.captured


def of_decoding(
    held: Scene, runner: Runner, layers: tuple[int, ...] = LAYERS, count: int = 3
) -> list[Tensor]:
    """States of so many steps, all looked at after the last."""
    runner.capture(held.base, layers)
    found = []
    with torch.inference_mode():
        for _ in range(count):
            runner.forward(held.next_batch(), held.pool)
            found.append(runner.captured)
    return found


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.cpu(), other.cpu(), atol=tolerance, rtol=tolerance)


# ---- in the engine


def short(temperature: float = 0.0) -> Load:
    """Prompts that share nothing, so that a head sees all of each, whatever the runner keeps."""
    requests = [
        ask(random_prompt(5 + 9 * i, 50 + i), n=1 + i % 2, max_tokens=24, seed=i, use_eos=False,
            temperature=temperature)
        for i in range(7)
    ]  # fmt: skip
    return Load(requests)


class Remembering(HeadDrafter):
    """A head that knows nothing, and remembers what it was shown and what it said to that."""

    def __init__(self, base: BaseModel):
        super().__init__(TorchHead(*untaught_head(base)))
        self.shown: list[tuple[Stream, int, Tensor]] = []
        self.drafts: dict[tuple[int, int, int], tuple[int, ...]] = {}  # by seed, sample and place

    def observe_hidden(self, stream: Stream, first: int, hidden: Tensor) -> None:
        self.shown.append((stream, first, hidden.cpu().clone()))
        super().observe_hidden(stream, first, hidden)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        drafts = super().propose(requests)
        for (stream, _), draft in zip(requests, drafts, strict=True):
            self.drafts[stream.params.seed, stream.sample_index, len(stream.tokens)] = draft.tokens
        return drafts


@dataclass(frozen=True)
class Written:
    """By an engine for which a head drafted, or none."""

    outputs: list[SampleOutput]
    head: Remembering | None
    num_accepted: int


def written(
    folder: Path, device: str, load: Load, streams: Streams | None, *, by_head: bool = True
) -> Written:
    """The load's answers, in float32; each request comes a step after the one before. streams
    None: the device's own."""
    base = BaseModel.load("tiny", folder, folder, torch.float32, torch.device(device))
    head = Remembering(base) if by_head else None
    drafting = Drafting(lambda _: head, DRAFTED) if by_head else None
    engine = engine_of(base, load, streams, drafting)
    versions = [version(base, rank, i) for i, rank in enumerate(RANKS)]
    outputs: dict[int, SampleOutput | BaseException] = {}
    for i, request in enumerate(load.requests):
        engine.submit(versions[i % 3], request, lambda o, i=i: outputs.__setitem__(i, o))
        engine.step()
    while engine.busy:
        engine.step()
    found = [outputs[i] for i in range(len(load.requests))]
    return Written(found, head, drafting.policy.num_accepted if drafting else 0)


def check_what_was_shown(folder: Path, head: Remembering, tolerance: float) -> None:
    """Against a pass over each finished text, on a CPU."""
    base = BaseModel.load("tiny", folder, folder, torch.float32, torch.device("cpu"))
    versions = {one.id: one for one in (version(base, rank, i) for i, rank in enumerate(RANKS))}
    texts: dict[int, np.ndarray] = {}
    for stream, first, hidden in head.shown:
        if stream.id not in texts:
            tokens = np.array(stream.tokens, np.int32)
            captured = capture_sequence(
                versions[stream.version],
                tokens,
                head.layers,
                stream.num_prompt,
                SequenceMetadata(1.0, 0),
            )
            texts[stream.id] = captured.hidden
        expected = texts[stream.id][first : first + len(hidden)]
        np.testing.assert_allclose(hidden.numpy(), expected, atol=tolerance, rtol=tolerance)


def same_tokens(ours: Written, theirs: Written) -> None:
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()


def alike(ours: Remembering, theirs: Remembering) -> float:
    """The share of places where both heads said the same; they were asked at the same ones."""
    places = ours.drafts.keys() & theirs.drafts.keys()
    assert len(places) > 0.5 * len(theirs.drafts)
    return sum(ours.drafts[place] == theirs.drafts[place] for place in places) / len(places)
