"""A step of RL on a server of the Tinker API: ours through the official SDK, SkyRL's by HTTP."""

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from benchmarks.lib.peers import Unavailable
from benchmarks.lib.server import (
    MODEL,
    embedded_flags,
    engine_flags,
    our_server,
    sdk_datum,
    sdk_for,
)
from benchmarks.lib.smollm2 import tokenizer_of
from benchmarks.lib.tinker_http import RequestFailed
from benchmarks.peers.rl_common import (
    LEARNING_RATE,
    MICROBATCH,
    RANK,
    StepLog,
    Work,
    centred,
    vowels,
)
from benchmarks.peers.skyrl_server import SkyrlModel, skyrl_server
from tinkercloud.embedded.native.compiler import instruction_set

GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""The most that the mean |difference| of a sampled token's log-probability, trainer's and
sampler's, may be where they compute it in different ways; in one compiled pass it is zero."""
PROBE_SEED = 10**6


@dataclass(frozen=True)
class Sample:
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Rollout:
    """A prompt with one of its samples, and the sample's advantage."""

    prompt: list[int]
    sample: Sample
    advantage: float

    def inputs(self) -> dict[str, np.ndarray]:
        """`tokens` and what importance_sampling asks for; zero before the sample."""
        whole = self.prompt + self.sample.tokens
        before = np.zeros(len(self.prompt) - 1, np.float32)
        advantages = np.full(len(self.sample.tokens), self.advantage, np.float32)
        return {
            "tokens": np.array(whole[:-1], np.int64),
            "target_tokens": np.array(whole[1:], np.int64),
            "logprobs": np.concatenate([before, np.array(self.sample.logprobs, np.float32)]),
            "advantages": np.concatenate([before, advantages]),
        }


class Policy(Protocol):
    """A LoRA model that is trained, and its newest published version, which is sampled."""

    async def sample(
        self, prompt: list[int], num_samples: int, max_tokens: int, seed: int
    ) -> list[Sample]: ...

    async def forward_backward(self, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        """importance_sampling; the log-probabilities of each datum's targets."""
        ...

    async def optim_step(self) -> None: ...

    async def publish(self) -> None: ...

    async def close(self) -> None: ...


class Tinkercloud:
    def __init__(self, tinker: Any, service: Any, training: Any):
        self._tinker, self._service, self._training = tinker, service, training
        self._sampling: Any = None

    @classmethod
    async def create(cls, tinker: Any) -> "Tinkercloud":
        """tinker: the SDK."""
        service = tinker.ServiceClient()
        # The layers that every contender's adapter is on.
        training = await service.create_lora_training_client(
            base_model=MODEL, rank=RANK, train_unembed=False
        )
        return cls(tinker, service, training)

    async def sample(
        self, prompt: list[int], num_samples: int, max_tokens: int, seed: int
    ) -> list[Sample]:
        params = self._tinker.SamplingParams(
            max_tokens=max_tokens, temperature=1.0, stop=[], seed=seed
        )
        tokens = self._tinker.ModelInput.from_ints(prompt)
        result = await self._sampling.sample(
            tokens, num_samples=num_samples, sampling_params=params
        )
        return [Sample(list(each.tokens), list(each.logprobs)) for each in result.sequences]

    async def forward_backward(self, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        datums = [
            sdk_datum(
                self._tinker, arrays["tokens"], {k: v for k, v in arrays.items() if k != "tokens"}
            )
            for arrays in data
        ]
        result = await self._training.forward_backward(datums, "importance_sampling")
        return [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]

    async def optim_step(self) -> None:
        await self._training.optim_step(self._tinker.AdamParams(learning_rate=LEARNING_RATE))

    async def publish(self) -> None:
        self._sampling = await self._training.save_weights_and_get_sampling_client()

    async def close(self) -> None:
        await self._service.close("success")


class Skyrl:
    def __init__(self, model: SkyrlModel):
        self._model = model

    async def sample(
        self, prompt: list[int], num_samples: int, max_tokens: int, seed: int
    ) -> list[Sample]:
        samples = await self._model.sample(prompt, num_samples, max_tokens, seed)
        return [Sample(sample["tokens"], sample["logprobs"]) for sample in samples]

    async def forward_backward(self, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        lists = [{name: array.tolist() for name, array in arrays.items()} for arrays in data]
        outputs = await self._model.forward_backward(lists, "importance_sampling")
        return [np.array(output["logprobs"]) for output in outputs]

    async def optim_step(self) -> None:
        await self._model.optim_step(LEARNING_RATE)

    async def publish(self) -> None:
        await self._model.publish()

    async def close(self) -> None:
        await self._model.api.close()


class Loop:
    """The script of RL that every Tinker server runs."""

    def __init__(self, policy: Policy, work: Work, log: StepLog, gap: float):
        self._policy, self._scale, self._log, self._gap = policy, work.scale, log, gap
        self._tokenizer = tokenizer_of(Path(work.model))
        self._prompts = [self._tokenizer.encode(text).ids for text in work.texts]

    async def run(self) -> None:
        self._log.doing = "the first publish"
        await self._policy.publish()
        first = await self._probe()
        for number in range(1 + self._scale.steps):
            await self._step(number)
            if self._log.fault:
                return
        if await self._probe() == first:
            self._log.fault = "the sampler's weights did not change"

    async def _step(self, number: int) -> None:
        log, policy = self._log, self._policy
        with log.phase("sample"):
            groups = await self._sample(number)
        with log.phase("reward"):
            batch = self._rewarded(groups)
        with log.phase("forward_backward"):
            data = [rollout.inputs() for rollout in batch]
            logprobs = await policy.forward_backward(data)
        self._check(batch, logprobs)
        with log.phase("optim_step"):
            await policy.optim_step()
        with log.phase("publish"):
            await policy.publish()
        log.end_step()

    async def _sample(self, number: int) -> list[list[Sample]]:
        scale, done = self._scale, 0

        async def group(index: int) -> list[Sample]:
            nonlocal done
            seed = number * scale.prompts + index
            sizes = (scale.samples, scale.tokens, seed)
            samples = await self._policy.sample(self._prompts[index], *sizes)
            done += len(samples)
            self._log.doing = f"sample ({done} of {scale.sequences} samples)"
            return samples

        return await asyncio.gather(*map(group, range(scale.prompts)))

    def _rewarded(self, groups: Sequence[Sequence[Sample]]) -> list[Rollout]:
        batch = []
        for prompt, group in zip(self._prompts, groups, strict=True):
            rewards = [vowels(self._tokenizer.decode(sample.tokens)) for sample in group]
            for sample, advantage in zip(group, centred(rewards), strict=True):
                batch.append(Rollout(prompt, sample, advantage))
        return batch

    def _check(self, batch: Sequence[Rollout], logprobs: Sequence[np.ndarray]) -> None:
        """Numbers of tokens, trainer against sampler, and a loss that is finite."""
        scale, gaps, loss = self._scale, [], 0.0
        short = [each for each in batch if len(each.sample.tokens) != scale.tokens]
        if len(batch) != scale.sequences or short:
            self._log.fault = f"{len(batch)} samples came, {len(short)} of another length"
            return
        for rollout, trained in zip(batch, logprobs, strict=True):
            difference = trained[-scale.tokens :] - np.array(rollout.sample.logprobs)
            gaps.append(float(np.abs(difference).mean()))
            loss -= rollout.advantage * float(np.exp(difference).sum())
        gap = float(np.mean(gaps))
        self._log.gap = max(gap, self._log.gap or 0.0)
        if not math.isfinite(loss):
            self._log.fault = "the loss is not finite"
        elif not gap <= self._gap:
            self._log.fault = f"trainer and sampler are {gap:.1e} apart"

    async def _probe(self) -> list[list[float]]:
        """What the published weights make of a prompt and a seed; the same shape as a step's."""
        self._log.doing = "the samples that show whether weights changed"
        sizes = (self._scale.samples, self._scale.tokens, PROBE_SEED)
        samples = await self._policy.sample(self._prompts[0], *sizes)
        return [sample.logprobs for sample in samples]


def run(policy: Callable[[], Awaitable[Policy]], work: Work, limit_s: float, gap: float) -> StepLog:
    """All steps, or what was done of them in `limit_s`. gap: see `GAP`."""

    async def whole(log: StepLog) -> None:
        try:
            async with asyncio.timeout(limit_s):
                model = await policy()
                try:
                    await Loop(model, work, log, gap).run()
                finally:
                    await model.close()
        except TimeoutError:
            log.stop(limit_s)

    log = StepLog()
    asyncio.run(whole(log))
    return log


def ours(model: Path, work: Work, max_batch: int, limit_s: float, dtype: str) -> StepLog:
    """model: GGUF file or Hugging Face folder."""
    gap = GAP[dtype] if instruction_set() == "none" else 0.0
    with our_server(*embedded_flags(model, dtype), *engine_flags(max_batch)) as server:
        tinker = sdk_for(server)
        return run(lambda: Tinkercloud.create(tinker), work, limit_s, gap)


def skyrl(peers: Path, work: Work, max_batch: int, limit_s: float) -> StepLog:
    """Raises Unavailable."""
    config = {
        "max_lora_adapters": 2,
        "max_lora_rank": RANK,
        "train_micro_batch_size": min(MICROBATCH, work.scale.sequences),
        "sample_max_num_sequences": min(max_batch, work.scale.sequences),
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        skyrl_server(peers, Path(work.model), config, Path(scratch)) as (url, server),
    ):

        async def policy() -> Policy:
            return Skyrl(await SkyrlModel.create(url, work.model, RANK))

        try:
            return run(policy, work, limit_s, GAP["float32"])
        except (httpx.HTTPError, RequestFailed) as error:
            raise Unavailable(f"failed: {error}; {server.last_words()}") from error
