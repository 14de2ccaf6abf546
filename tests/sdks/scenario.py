"""What a user does with an SDK, from training to download: `python scenario.py MODEL RATE`.

Runs inside the environment of one SDK version, on the server that the environment names, and
prints one JSON object: for each feature its numbers, or why it failed. Only tinker, numpy and
torch are imported, and no call that the oldest tested version lacks.
"""

import json
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

RANK, SEED = 8, 1
PROMPT = [11, 12, 13]
SEQUENCES = [[i, i + 1, i + 2, 5] for i in range(1, 6)]
ABSENT = "absent"  # the SDK has no such call


def ended_well(run: "subprocess.CompletedProcess[str]") -> bool:
    """Of the official command line. Also where it aborted after all its work, without a word:
    threads of its HTTP library (pyqwest) may call into Python while that shuts down, which Python
    before 3.14 answers by ending the thread, and so, under frames of Rust, the process."""
    return run.returncode == 0 or (run.returncode == -signal.SIGABRT and not run.stderr)


class CannotDo(Exception):
    """This SDK has no call for the feature."""


def settled(value: Any) -> Any:
    """What a call gives, whether this version hands out the thing or a future of it."""
    return value.result() if hasattr(value, "result") else value


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    arrays: dict[str, Any] = {"target_tokens": np.array(tokens[1:])}
    arrays |= {name: np.array(values, np.float32) for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


WEIGHTED = [datum(tokens, weights=[0.0, 1.0, 0.5]) for tokens in SEQUENCES]
PLAIN = [datum(tokens) for tokens in SEQUENCES]  # without weights: 1 for each token


def logprobs_of(client: Any, data: list[types.Datum] = PLAIN) -> list[list[float]]:
    output = settled(client.forward(data, "cross_entropy"))
    return [out["logprobs"].to_numpy().tolist() for out in output.loss_fn_outputs]


class Scenario:
    """The features in their order; a later one may use what an earlier one left."""

    def __init__(self, model: str, learning_rate: float):
        self.model = model
        self.adam = types.AdamParams(learning_rate=learning_rate)
        self.service = tinker.ServiceClient()
        self.rest = self.service.create_rest_client()
        self.client = self.new_client()

    def new_client(self) -> Any:
        create = self.service.create_lora_training_client
        return settled(create(self.model, rank=RANK, seed=SEED))

    def step(self, client: Any) -> float:
        """One training step; the loss before it."""
        loss = settled(client.forward_backward(WEIGHTED, "cross_entropy"))
        norm = settled(client.optim_step(self.adam)).metrics["unclipped_grad_l2:mean"]
        assert norm > 0
        return loss.metrics["loss:sum"]

    def sft(self) -> Any:
        losses = [self.step(self.client) for _ in range(4)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0], losses
        return losses

    def forward(self) -> Any:
        return logprobs_of(self.client)

    def rl(self) -> Any:
        sampler = settled(self.client.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=5, seed=3, temperature=1.0)
        prompt = types.ModelInput.from_ints(PROMPT)
        response = settled(sampler.sample(prompt, num_samples=4, sampling_params=params))
        data = [self._rl_datum(sequence, 1.0) for sequence in response.sequences]
        loss = settled(self.client.forward_backward(data, "importance_sampling"))
        num_tokens = sum(len(sequence.tokens) for sequence in response.sequences)
        # the sampler's log-probabilities are the trainer's, so every ratio is 1
        assert abs(loss.metrics["loss:sum"] + num_tokens) < 0.01 * num_tokens, loss.metrics
        before = self._mean_logprob(data)
        settled(self.client.optim_step(self.adam))
        after = self._mean_logprob(data)
        assert after > before, (before, after)  # what was rewarded is likelier
        return {
            "tokens": [list(sequence.tokens) for sequence in response.sequences],
            "logprobs": [list(sequence.logprobs) for sequence in response.sequences],
            "mean logprob": [before, after],
        }

    def _rl_datum(self, sequence: Any, advantage: float) -> types.Datum:
        num_prompt, num_sampled = len(PROMPT) - 1, len(sequence.tokens)
        return datum(
            [*PROMPT, *sequence.tokens],
            logprobs=[0.0] * num_prompt + list(sequence.logprobs),
            advantages=[0.0] * num_prompt + [advantage] * num_sampled,
        )

    def _mean_logprob(self, data: list[types.Datum]) -> float:
        output = settled(self.client.forward(data, "importance_sampling"))
        rows = [out["logprobs"].to_numpy() for out in output.loss_fn_outputs]
        return float(np.mean([row[len(PROMPT) - 1 :].mean() for row in rows]))

    def custom_loss(self) -> Any:
        import torch

        def square(data: Any, logprobs: Any) -> Any:
            loss = torch.cat([values.flatten() for values in logprobs]).square().sum()
            return loss, {"square": loss.item()}

        squares = []
        for _ in range(3):
            output = settled(self.client.forward_backward_custom(WEIGHTED, square))
            settled(self.client.optim_step(self.adam))
            squares.append(output.metrics["square"])
        assert squares == sorted(squares, reverse=True) and squares[-1] < squares[0], squares
        return squares

    def save(self) -> Any:
        self.at_save = logprobs_of(self.client)
        self.state = settled(self.client.save_state("state")).path
        self.sampler = settled(self.client.save_weights_for_sampler("sampler")).path
        for path, kind in ((self.state, "weights"), (self.sampler, "sampler_weights")):
            assert path.startswith("tinker://") and f"/{kind}/" in path, path
        return [path.split("/", 3)[3] for path in (self.state, self.sampler)]

    def chunks(self) -> Any:
        """More data than any version sends in one request."""
        output = settled(self.client.forward(PLAIN * 220, "cross_entropy"))
        assert len(output.loss_fn_outputs) == 220 * len(PLAIN)
        few = settled(self.client.forward(PLAIN, "cross_entropy")).metrics["loss:sum"]
        assert abs(output.metrics["loss:sum"] / (220 * few) - 1) < 1e-4

    def failures(self) -> Any:
        """A request at fault is the user's, and the client goes on."""
        try:
            settled(self.client.forward_backward([datum(SEQUENCES[0])], "importance_sampling"))
        except tinker.RequestFailedError as error:
            assert "advantages" in str(error) and error.category.value == "user", error
            return logprobs_of(self.client)
        raise AssertionError("a policy gradient without advantages did not fail")

    def load(self) -> Any:
        """Into a model that exists: the older way, which every version still has."""
        client = self.new_client()
        settled(client.load_state(self.state))
        logprobs = logprobs_of(client)
        assert logprobs == self.at_save
        by_name = self.new_client()
        assert settled(by_name.load_state("state")).path == self.state
        assert logprobs_of(by_name) == logprobs
        return logprobs

    def resume(self) -> Any:
        create = self.service.create_training_client_from_state_with_optimizer
        resumed = settled(create(self.state))
        losses = [self.step(resumed) for _ in range(3)]
        assert losses == [self.step(self.client) for _ in range(3)], losses
        return losses

    def sample_saved(self) -> Any:
        sampler = settled(self.service.create_sampling_client(model_path=self.sampler))
        params = types.SamplingParams(max_tokens=5, temperature=0.0)
        prompt = types.ModelInput.from_ints(PROMPT)
        [sequence] = settled(sampler.sample(prompt, 1, params)).sequences
        return {"tokens": list(sequence.tokens), "stop": sequence.stop_reason}

    def prompt_logprobs(self) -> Any:
        sampler = settled(self.service.create_sampling_client(base_model=self.model))
        prompt = types.ModelInput.from_ints(PROMPT)
        first, *others = settled(sampler.compute_logprobs(prompt))
        assert first is None and all(value < 0 for value in others)
        top = settled(
            sampler.sample(
                prompt,
                1,
                types.SamplingParams(max_tokens=1, seed=1),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=2,
            )
        ).topk_prompt_logprobs
        assert top[0] is None and [len(row) for row in top[1:]] == [2, 2]
        return {"logprobs": others, "top": [[list(pair) for pair in row] for row in top[1:]]}

    def listings(self) -> Any:
        run = self.state.removeprefix("tinker://").split("/")[0]
        names = {c.checkpoint_id for c in settled(self.rest.list_checkpoints(run)).checkpoints}
        assert {"weights/state", "sampler_weights/sampler"} <= names, names
        assert settled(self.rest.get_training_run(run)).base_model == self.model
        everyone = settled(self.rest.list_user_checkpoints(limit=1000)).checkpoints
        assert self.state in {c.tinker_path for c in everyone}
        info = settled(self.rest.get_weights_info_by_tinker_path(self.state))
        served = self.service.get_server_capabilities().supported_models
        assert self.model in {model.model_name for model in served}
        return {"names": sorted(names), "rank": info.lora_rank}

    def publish(self) -> Any:
        settled(self.rest.publish_checkpoint_from_tinker_path(self.sampler))
        settled(self.rest.unpublish_checkpoint_from_tinker_path(self.sampler))

    def expiry(self) -> Any:
        if not hasattr(self.rest, "set_checkpoint_ttl_from_tinker_path"):
            raise CannotDo
        settled(self.rest.set_checkpoint_ttl_from_tinker_path(self.sampler, 7200))

    def download(self) -> Any:
        """By the command line, as users do."""
        with tempfile.TemporaryDirectory() as folder:
            kind = () if hasattr(self.rest, "get_checkpoint_archive_url") else ("training",)
            path = self.sampler if not kind else self.state
            self._cli("checkpoint", "download", path, "--output", folder)
            return sorted(file.name for file in Path(folder).rglob("*") if file.is_file())

    def command_line(self) -> Any:
        run = self.state.removeprefix("tinker://").split("/")[0]
        shown = json.loads(self._cli("--format", "json", "checkpoint", "list", "--run-id", run))
        runs = json.loads(self._cli("--format", "json", "run", "info", run))
        return [len(shown["checkpoints"]), "model" in json.dumps(runs)]

    def _cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "tinker.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended_well(done), f"{done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def delete(self) -> Any:
        settled(self.rest.delete_checkpoint_from_tinker_path(self.sampler))
        run = self.state.removeprefix("tinker://").split("/")[0]
        names = {c.checkpoint_id for c in settled(self.rest.list_checkpoints(run)).checkpoints}
        assert "sampler_weights/sampler" not in names
        return sorted(names)

    def unload(self) -> Any:
        """No public method: the resource, which versions up to 0.25 have."""
        from tinker.lib.client_connection_pool_type import ClientConnectionPoolType as Pool

        if not hasattr(types, "UnloadModelRequest"):
            raise CannotDo
        model_id, holder = self.client.model_id, self.client.holder

        async def unload() -> Any:
            with holder.aclient(Pool.TRAIN) as client:
                if not hasattr(client.models, "unload"):
                    raise CannotDo
                request = types.UnloadModelRequest(model_id=model_id)
                return await client.models.unload(request=request)

        assert holder.run_coroutine_threadsafe(unload()).result().request_id
        try:
            self.client.get_info()
        except tinker.NotFoundError:
            return None
        raise AssertionError("the model is still there")


FEATURES = (
    "sft",
    "forward",
    "rl",
    "custom_loss",
    "chunks",
    "failures",
    "save",
    "load",
    "resume",
    "sample_saved",
    "prompt_logprobs",
    "listings",
    "publish",
    "expiry",
    "download",
    "command_line",
    "delete",
    "unload",
)


def outcome(feature: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"ok": True, "result": feature()}
    except CannotDo:
        return {"ok": True, "result": ABSENT}
    except Exception:  # noqa: BLE001 - whatever it is, it is the report
        return {"ok": False, "error": traceback.format_exc(limit=-3)}


def main() -> None:
    scenario = Scenario(sys.argv[1], float(sys.argv[2]))
    outcomes = {name: outcome(getattr(scenario, name)) for name in FEATURES}
    sys.stdout.write(json.dumps({"version": version("tinker"), "features": outcomes}) + "\n")


if __name__ == "__main__":
    main()
