"""What should have come of it: the operations on record one after another, each once, on a backend
that nothing disturbs."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.simulation.agents import MAX_TOKENS
from tests.simulation.engine import SmallFakeBackend
from tests.simulation.history import Chat, Request
from tests.simulation.tokenizer import text_of, tokens_of
from tinker_gmi.types import EncodedTextChunk, ModelInput, SampleRequest, SamplingParams
from tinkercloud.backends.fake_model import ModelState, Published
from tinkercloud.backends.fake_sampling import draw_samples
from tinkercloud.core.custom_batch import custom_batch
from tinkercloud.core.types import AdamParams, LoraSpec, SampleOutput, TrainOutput
from tinkercloud.errors import TinkercloudError
from tinkercloud.services.common.bodies import protobuf_call
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.wire.codec import decode_sample_output, decode_train_output

SEGMENTS = {
    "save_state": "weights",
    "export": "external_weights",
    **dict.fromkeys(("save_sampler", "snapshot", "inflight"), "sampler_weights"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A request as the database has it at the end. place: of its operation in the model's order."""

    request_id: str
    user: str
    kind: str
    owner: str | None
    seq_id: int | None
    status: str
    body: bytes
    place: float | None

    @property
    def is_refusal(self) -> bool:
        """Of an operation on a model that does not exist, or whose number another one has: it
        belongs to nothing."""
        texts = ("does not exist", "was taken by another request")
        is_named = any(text in str(self.body) for text in texts)
        return self.owner is None and self.status == "failed" and is_named

    @property
    def failure(self) -> tuple[str, str] | None:
        """(category, text)"""
        if self.status != "failed":
            return None
        value = json.loads(self.body)
        return value["category"], value["error"]


@dataclass(eq=False)
class Oracle:
    """states: of saved checkpoints by path. versions: of samplers. inflight: by model."""

    backend: SmallFakeBackend = field(default_factory=SmallFakeBackend)
    states: dict[str, ModelState] = field(default_factory=dict)
    versions: dict[str, ModelState] = field(default_factory=dict)
    inflight: dict[str, list[str]] = field(default_factory=dict)
    steps: dict[str, list[ModelState]] = field(default_factory=dict)
    """By model: its state after each step, in order."""

    def __post_init__(self) -> None:
        self.catalog = Catalog(tuple(base.served for base in self.backend._bases.values()))

    @property
    def models(self) -> dict[str, ModelState]:
        return self.backend._models

    def is_blocked(self, request: Request) -> bool:
        """It loads what has not been saved yet."""
        return (
            request.kind in ("create_from_state", "load_into")
            and request.body["path"] not in self.states
        )

    async def apply(self, request: Request, recorded: bytes) -> Any:
        """The result that it must have. recorded: the one that it has. Raises TinkercloudError
        where it must fail."""
        body, model_id = request.body, request.owner
        match request.kind:
            case "create_model":
                await self.backend.create_model(model_id, body["base_model"], LoraSpec(4, 1))
                return {"model_id": model_id, "type": "create_model"}
            case "create_from_state" | "load_into":
                self._load(model_id, body)
                return {"path": body["path"], "model_id": model_id, "type": "load_weights"}
            case "forward_backward" | "forward":
                raw = protobuf_call(request.post[1]).raw
                converter = self.catalog.converter(self.models[model_id].base_model)
                if request.custom_loss is None:
                    batch = converter.train_batch(raw, request.records)
                else:
                    batch = custom_batch(converter, raw, request.custom_loss)
                return await self.backend.forward_backward(model_id, batch)
            case "optim_step":
                result = await self.backend.optim_step(model_id, AdamParams(**body["adam_params"]))
                self.steps.setdefault(model_id, []).append(self.models[model_id])
                return result
            case _:
                return self._save(request, recorded)

    def _load(self, model_id: str, body: dict[str, Any]) -> None:
        state = self.states[body["path"]]
        if not body["optimizer"]:
            zeros = np.zeros_like(state.table)
            state = replace(state, first=zeros, second=zeros, step=0)
        self.models[model_id] = state

    def _save(self, request: Request, recorded: bytes) -> dict[str, Any]:
        state = replace(self.models[request.owner], gradient=None)
        segment = SEGMENTS[request.kind]
        if "path" in request.body:
            path = f"tinker://{request.owner}/{segment}/{request.body['path']}"
            self.states[path] = state
            return {"path": path}
        sampler_id = request.sampler_id_in(recorded)
        self.versions[sampler_id] = state
        if request.kind == "inflight":
            self.inflight.setdefault(request.owner, []).append(sampler_id)
        return {"sampling_session_id": sampler_id}

    def pin(self, sampler_id: str, weights: dict[str, Any]) -> None:
        """A sampler of a path or of a base model."""
        if "model_path" in weights:
            self.versions[sampler_id] = self.states[weights["model_path"]]
            return
        table = self.backend._bases[weights["base_model"]].fresh_table()
        lora = LoraSpec(4, 1)
        self.versions[sampler_id] = ModelState(weights["base_model"], lora, table, table, table)

    def samples(self, request: Request) -> list[SampleOutput]:
        """From the version that its sampler pinned. Inflight samplers follow their model: from any
        that was saved so."""
        owner = request.owner
        followed = next((each for each in self.inflight.values() if owner in each), (owner,))
        return [self._sample(request, self.versions[sampler_id]) for sampler_id in followed]

    def texts(self, chat: Chat) -> list[str]:
        """One for each version that the sampler may have had."""
        owner = chat.sampler_id
        followed = next((each for each in self.inflight.values() if owner in each), [owner])
        chunk = EncodedTextChunk(tokens=tokens_of(chat.letters))
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=chat.seed)
        body = SampleRequest(prompt=ModelInput(chunks=[chunk]), sampling_params=params)
        drawn = [self._drawn(body, self.versions[sampler_id]) for sampler_id in followed]
        return [text_of(output.sequences[0].tokens) for output in drawn]

    def _sample(self, request: Request, state: ModelState) -> SampleOutput:
        return self._drawn(SampleRequest.model_validate(request.body), state)

    def _drawn(self, body: SampleRequest, state: ModelState) -> SampleOutput:
        asked = self.catalog.converter(state.base_model).sample_request(body)
        return draw_samples(Published(self.backend._bases[state.base_model], state.table), asked)


def difference(request: Request, row: Row, expected: Any) -> str | None:
    """How the recorded result is not the expected one."""
    if isinstance(expected, TrainOutput):
        got = decode_train_output(row.body)
        if got.metrics["loss:sum"] != expected.metrics["loss:sum"]:
            return f"loss {got.metrics['loss:sum']}, not {expected.metrics['loss:sum']}"
        pairs = zip(got.outputs, expected.outputs, strict=True)
        same = all(np.array_equal(a["logprobs"], b["logprobs"]) for a, b in pairs)
        return None if same else "other log-probabilities"
    if isinstance(expected, SampleOutput):
        sequences = decode_sample_output(row.body).sequences
        pairs = zip(sequences, expected.sequences, strict=True)
        same = all(
            np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
            for a, b in pairs
        )
        return None if same else "other tokens or log-probabilities"
    value = json.loads(row.body)
    got = value.get("metrics", value)
    wrong = {name: got.get(name) for name in expected if got.get(name) != expected[name]}
    return f"{wrong}, not {expected}" if wrong else None


def state_difference(got: ModelState, expected: ModelState) -> str | None:
    for name in ("table", "first", "second", "gradient"):
        one, other = getattr(got, name), getattr(expected, name)
        if (one is None) != (other is None) or (one is not None and not np.array_equal(one, other)):
            return f"another {name}"
    return None if got.step == expected.step else f"step {got.step}, not {expected.step}"


__all__ = ["Oracle", "Row", "TinkercloudError", "difference", "state_difference"]
