"""A step of RL on a server of the Tinker API: ours through the official SDK, SkyRL's by HTTP."""

import asyncio
import math
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
from peers.rl_common import (
    LEARNING_RATE,
    MICROBATCH,
    RANK,
    Diary,
    Work,
    centred,
    vowels,
)
from peers.sampling_common import Unavailable
from peers.skyrl_server import SkyrlModel, skyrl_server
from tokenizers import Tokenizer

from tests.serving import start_server

MODEL = "smollm2"
KV_CACHE_BYTES = 4 * 1024**3
GAP = {"float32": 1e-3, "bfloat16": 0.1}  # mean, of log-probabilities, trainer from sampler
"""Mean |difference| of a sampled token's log-probability, trainer's and sampler's, in float32."""
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
    def __init__(self, service: Any, training: Any):
        self._service, self._training = service, training
        self._sampling: Any = None

    @classmethod
    async def create(cls) -> "Tinkercloud":
        import tinker  # here, because it reads the environment

        service = tinker.ServiceClient()
        # The layers that every contender's adapter is on.
        training = await service.create_lora_training_client(
            base_model=MODEL, rank=RANK, train_unembed=False
        )
        return cls(service, training)

    async def sample(
        self, prompt: list[int], num_samples: int, max_tokens: int, seed: int
    ) -> list[Sample]:
        import tinker

        params = tinker.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[], seed=seed)
        told = await self._sampling.sample(
            tinker.ModelInput.from_ints(prompt), num_samples=num_samples, sampling_params=params
        )
        return [Sample(list(one.tokens), list(one.logprobs)) for one in told.sequences]

    async def forward_backward(self, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        import tinker

        def datum(one: dict[str, np.ndarray]) -> Any:
            inputs = {k: tinker.TensorData.from_numpy(v) for k, v in one.items() if k != "tokens"}
            prompt = tinker.ModelInput.from_ints(one["tokens"].tolist())
            return tinker.Datum(model_input=prompt, loss_fn_inputs=inputs)

        told = await self._training.forward_backward(
            [datum(one) for one in data], "importance_sampling"
        )
        return [one["logprobs"].to_numpy() for one in told.loss_fn_outputs]

    async def optim_step(self) -> None:
        import tinker

        await self._training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE))

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
        told = await self._model.sample(prompt, num_samples, max_tokens, seed)
        return [Sample(one["tokens"], one["logprobs"]) for one in told]

    async def forward_backward(self, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        plain = [{name: values.tolist() for name, values in one.items()} for one in data]
        told = await self._model.forward_backward(plain, "importance_sampling")
        return [np.array(one["logprobs"]) for one in told]

    async def optim_step(self) -> None:
        await self._model.optim_step(LEARNING_RATE)

    async def publish(self) -> None:
        await self._model.publish()

    async def close(self) -> None:
        await self._model.http.aclose()


class Loop:
    """The script of RL that every Tinker server runs."""

    def __init__(self, policy: Policy, work: Work, diary: Diary, gap: float):
        self._policy, self._scale, self._diary, self._gap = policy, work.scale, diary, gap
        self._tokenizer = Tokenizer.from_file(f"{work.model}/tokenizer.json")
        self._prompts = [self._tokenizer.encode(text).ids for text in work.texts]

    async def run(self) -> None:
        self._diary.doing = "the first publish"
        await self._policy.publish()
        first = await self._probe()
        for number in range(1 + self._scale.steps):
            await self._step(number)
            if self._diary.fault:
                return
        if await self._probe() == first:
            self._diary.fault = "the sampler's weights did not change"

    async def _step(self, number: int) -> None:
        diary, policy = self._diary, self._policy
        with diary.phase("sample"):
            groups = await self._sample(number)
        with diary.phase("reward"):
            batch = self._rewarded(groups)
        with diary.phase("forward_backward"):
            data = [one.inputs() for one in batch]
            logprobs = await policy.forward_backward(data)
        self._check(batch, logprobs)
        with diary.phase("optim_step"):
            await policy.optim_step()
        with diary.phase("publish"):
            await policy.publish()
        diary.end_step()

    async def _sample(self, number: int) -> list[list[Sample]]:
        scale, done = self._scale, 0

        async def group(index: int) -> list[Sample]:
            nonlocal done
            seed = number * scale.prompts + index
            sizes = (scale.samples, scale.tokens, seed)
            samples = await self._policy.sample(self._prompts[index], *sizes)
            done += len(samples)
            self._diary.doing = f"sample ({done} of {scale.sequences} samples)"
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
        short = [one for one in batch if len(one.sample.tokens) != scale.tokens]
        if len(batch) != scale.sequences or short:
            self._diary.fault = f"{len(batch)} samples came, {len(short)} of another length"
            return
        for one, theirs in zip(batch, logprobs, strict=True):
            difference = theirs[-scale.tokens :] - np.array(one.sample.logprobs)
            gaps.append(float(np.abs(difference).mean()))
            loss -= one.advantage * float(np.exp(difference).sum())
        gap = float(np.mean(gaps))
        self._diary.gap = max(gap, self._diary.gap or 0.0)
        if not math.isfinite(loss):
            self._diary.fault = "the loss is not finite"
        elif not gap < self._gap:
            self._diary.fault = f"trainer and sampler are {gap:.1e} apart"

    async def _probe(self) -> list[list[float]]:
        """What the published weights make of a prompt and a seed; the same shape as a step's."""
        self._diary.doing = "the samples that show whether weights changed"
        sizes = (self._scale.samples, self._scale.tokens, PROBE_SEED)
        return [one.logprobs for one in await self._policy.sample(self._prompts[0], *sizes)]


def run(
    policy: Callable[[], Awaitable[Policy]], work: Work, limit_s: float, dtype: str = "float32"
) -> Diary:
    """All steps, or what was done of them in `limit_s`."""

    async def whole(diary: Diary) -> None:
        try:
            async with asyncio.timeout(limit_s):
                own = await policy()
                try:
                    await Loop(own, work, diary, GAP[dtype]).run()
                finally:
                    await own.close()
        except TimeoutError:
            diary.stop(limit_s)

    diary = Diary()
    asyncio.run(whole(diary))
    return diary


def ours(model: Path, work: Work, max_batch: int, limit_s: float, dtype: str) -> Diary:
    """model: GGUF file or Hugging Face folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(
            *("--backend", "embedded", "--model", f"{MODEL}={model}", "--dtype", dtype),
            *("--engine-max-batch", str(max_batch)),
            *("--engine-kv-cache-bytes", str(KV_CACHE_BYTES)),
            data_dir=Path(folder) / "data",
        ) as server,
    ):
        os.environ.update(server.sdk_environment)
        return run(Tinkercloud.create, work, limit_s, dtype)


def skyrl(peers: Path, work: Work, max_batch: int, limit_s: float) -> Diary:
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
            return run(policy, work, limit_s)
        except httpx.HTTPError as error:
            raise Unavailable(f"failed: {error}; {server.last_words()}") from error
