"""transformers' generate: one padless batch, its SDPA attention and growing cache, in a process of
its own with every core. As a script it is that process, in the peer's environment."""

import asyncio
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.sampling_common import (
    Load,
    Outcome,
    Unavailable,
    outcome,
    peer_environment,
    python_of,
    serve_lines,
    version_of,
)

SCRIPT = Path(__file__).resolve()
LINE_LIMIT_BYTES = 64 * 1024**2


class Transformers:
    name = "transformers"

    def __init__(self, process: asyncio.subprocess.Process, version: str):
        self._process = process
        self.version = version
        self.pid = process.pid

    @classmethod
    async def start(cls, peers: Path, model: Path, dtype: str) -> "Transformers":
        """model: a Hugging Face folder. Raises Unavailable."""
        python = python_of(peers, "transformers")
        version = version_of(python, "transformers")
        process = await asyncio.create_subprocess_exec(
            *(python, SCRIPT, model, dtype),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_LIMIT_BYTES,
            env=peer_environment(),
        )
        return cls(process, version)

    async def prepare(self, load: Load) -> None:
        """A short load of the same shape: allocations and caches of the library."""
        prompts = tuple(prompt[:8] for prompt in load.prompts)
        await self.generate(Load(prompts, 4, load.num_samples))

    async def generate(self, load: Load) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(vars(load)).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise Unavailable(f"its process ended with status {await self._process.wait()}")
        return Outcome(**json.loads(line))

    async def latency(self, load: Load) -> None:
        return None

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    class Clock(LogitsProcessor):
        """When each step's logits were there: all sequences of the batch step together."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids, scores):
            self.times.append(time.perf_counter())
            return scores

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    model.eval().generation_config.eos_token_id = None  # samples end by their length only
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    @torch.inference_mode()
    def answer(load: Load) -> Outcome:
        clock, begun = Clock(), time.perf_counter()
        ids = torch.tensor(load.prompts)
        how = {"do_sample": False} if load.greedy else SAMPLED
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=load.max_tokens,
            num_return_sequences=load.num_samples,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
            **how,
        )
        told = outcome(load, begun, out[:, ids.shape[1] :].tolist())
        ends = [*clock.times[1:], begun + told.wall_s]
        told.first_s = [ends[0] - begun] * load.num_sequences
        told.gaps_s = [b - a for a, b in pairwise(ends)]
        return told

    serve_lines(answer)


SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

if __name__ == "__main__":
    main()
