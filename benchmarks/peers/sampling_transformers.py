"""transformers' generate: one padless batch, its SDPA attention and growing cache, in a process of
its own with every core. As a script it is that process, in the peer's environment."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.peer_script import Replies
from benchmarks.lib.peers import Script, Unavailable, peer_environment, python_of, version_of
from benchmarks.peers.sampling_common import Load, Outcome, gaps, outcome

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
        script = Script("sampling_transformers", python_of(peers, "transformers"))
        version = version_of(peers, "transformers")
        process = await asyncio.create_subprocess_exec(
            *script.command(model, dtype),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_LIMIT_BYTES,
            env=peer_environment(),
            cwd=ROOT,
        )
        return cls(process, version)

    async def prepare(self, load: Load) -> None:
        await self.generate(load.warm_up)

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
    replies = Replies()
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
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        load, clock, start = Load(**request), Clock(), time.perf_counter()
        ids = torch.tensor(load.prompts)
        choice = {"do_sample": False} if load.greedy else SAMPLED
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=load.max_tokens,
            num_return_sequences=load.num_samples,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
            **choice,
        )
        result = outcome(load, start, out[:, ids.shape[1] :].tolist())
        ends = [*clock.times[1:], start + result.wall_s]
        result.first_s = [ends[0] - start] * load.num_sequences
        result.gaps_s = gaps(ends)
        return vars(result)

    replies.serve(answer)


SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

if __name__ == "__main__":
    main()
