"""A server with something in every view: what the console's tests look at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

import tinker_gmi as tinker
from tests.chat.model_folder import write_model_folder
from tests.console.served import ENDLESS
from tests.serving import Server, running
from tinker_gmi.run_metrics import RunMetrics

HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=1</script>"
"""A token of the model; it learns to say this."""
MODEL = "chatty"
NUM_BUCKETS = 16  # the fake backend's model learns what follows a token by its number modulo this


@dataclass(frozen=True, slots=True)
class Scene:
    server: Server
    sft: str
    """A run with a checkpoint, whose samples are HOSTILE."""
    rl: str
    session: str
    checkpoint: str
    capture: str

    @property
    def views(self) -> list[str]:
        """The addresses of all."""
        return [
            *("runs", f"runs/{self.rl}", "sessions", f"sessions/{self.session}", "samples"),
            *("checkpoints", f"chat?model={self.checkpoint}", "captures"),
            *(f"captures/{self.capture}", "queue", "server", "speculation"),
        ]


@contextmanager
def serving_scene(folder: Path) -> Iterator[Scene]:
    model = write_model_folder(folder / "model")
    hostile = _add_token(model / "tokenizer.json")
    arguments = ("--backend", "fake", "--model", f"{MODEL}={model}", "--drain-s", "0")
    with running(Server(arguments, folder / "data", module="tests.console.served")) as server:
        yield _play(server, hostile)


def _add_token(path: Path) -> int:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(HOSTILE, normalized=False)])
    tokenizer.save(str(path))
    number = tokenizer.token_to_id(HOSTILE)
    assert number is not None
    config = path.with_name("config.json")
    config.write_text(config.read_text().replace(str(number), str(tokenizer.get_vocab_size())))
    return number


def _play(server: Server, hostile: int) -> Scene:
    with tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key) as service:
        sft = service.create_lora_training_client(base_model=MODEL, rank=8).result()
        rl = service.create_lora_training_client(base_model=MODEL, rank=4).result()
        checkpoint = _teach(sft, hostile)
        _reinforce(rl)
        _report(server, rl.model_id)
        rl.optim_step(tinker.AdamParams(learning_rate=ENDLESS))
        rl.optim_step(tinker.AdamParams(learning_rate=ENDLESS))
        session = sft.model_id.split(":")[0]
        return Scene(server, sft.model_id, rl.model_id, session, checkpoint, _capture(server))


def tensors(*, target_tokens: list[int], **floats: list[float]) -> dict[str, tinker.TensorData]:
    """Inputs of a loss."""
    return {
        "target_tokens": tinker.TensorData.from_numpy(np.array(target_tokens, np.int64)),
        **{
            name: tinker.TensorData.from_numpy(np.array(values, np.float32))
            for name, values in floats.items()
        },
    }


def _teach(training: tinker.TrainingClient, hostile: int) -> str:
    """The checkpoint's path."""
    tokens = list(range(100, 100 + NUM_BUCKETS))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs=tensors(target_tokens=[hostile] * NUM_BUCKETS, weights=[1.0] * NUM_BUCKETS),
    )
    for _ in range(12):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1.0)).result()
    training.save_state("state").result()
    path = training.save_weights_for_sampler("taught").result().path
    assert path is not None
    sampler = training.save_weights_and_get_sampling_client().result()
    _sample(sampler, 1)
    return path


def _sample(sampler: tinker.SamplingClient, seed: int) -> list[tinker.SampledSequence]:
    prompt = tinker.ModelInput.from_ints(list(range(60, 76)))
    params = tinker.SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
    return sampler.sample(prompt, num_samples=2, sampling_params=params).result().sequences


def _reinforce(training: tinker.TrainingClient) -> None:
    for step in range(6):
        sampler = training.save_weights_and_get_sampling_client().result()
        sequences = _sample(sampler, step)
        data = [_rl_datum(sequence) for sequence in sequences]
        training.forward_backward(data, "ppo").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()


def _report(server: Server, run_id: str) -> None:
    """What a script that trains the run would: more than is drawn at once."""
    with RunMetrics(server.base_url, server.api_key) as metrics:
        for step in range(6):
            others = {f"time/part_{i}": 0.1 * i + step for i in range(12)}
            points = [(step, {"reward": step / 5, HOSTILE[:128]: 1.0, **others})]
            metrics.report_many(run_id, points)


def _rl_datum(sequence: tinker.SampledSequence) -> tinker.Datum:
    tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
    advantages = np.where(np.array(tokens) % 2 == 0, 1.0, -1.0)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([75, *tokens[:-1]]),
        loss_fn_inputs=tensors(
            target_tokens=tokens, logprobs=logprobs, advantages=advantages.tolist()
        ),
    )


def _capture(server: Server) -> str:
    """Three episodes of one turn, with rewards 0, 1 and 2."""
    with server.http() as http:
        made = http.post("/api/v1/captures", json={"model": MODEL}).raise_for_status().json()
        capture = made["capture_id"]
        for episode in range(3):
            question = {"role": "user", "content": f"{episode} and two, and <b>three</b>?"}
            body = {"model": "any", "messages": [question], "max_tokens": 8, "seed": episode}
            labels = f"{capture}/groups/problem/episodes/{episode}"
            url = f"/captures/{labels}/oai/api/v1/chat/completions"
            http.post(url, json=body).raise_for_status()
            reward = {"value": episode, "group": "problem", "episode": str(episode)}
            http.post(f"/api/v1/captures/{capture}/rewards", json=reward).raise_for_status()
    return capture
