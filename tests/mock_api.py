"""A few dozen lines of the training API behind an httpx transport: what the SDK's tests talk to.

It computes with plain arithmetic: the log-probability of a target token t is -t / 10.
"""

import json
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tinker_gmi import RetryPolicy, ServiceClient
from tinkercloud.core.types import SampledSequence, SampleOutput, TrainOutput
from tinkercloud.wire import codec

PROTOBUF = {"content-type": "application/x-protobuf"}
FAST = RetryPolicy(first_delay_s=0.01, max_delay_s=0.05, give_up_s=2.0)
DROP = "drop the connection"


@dataclass
class MockApi:
    """`script[path]`: what the next requests to a path get instead of an answer: a status, a JSON
    answer, or DROP. `requests`: (path, body) as they came; `executed`: distinct training work."""

    config: dict[str, Any] = field(default_factory=dict)
    script: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    requests: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    executed: dict[tuple[str, int], Any] = field(default_factory=dict)
    results: dict[str, httpx.Response] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, **arguments: Any) -> ServiceClient:
        transport = httpx.MockTransport(self.answer)
        fields = {"base_url": "http://mock", "retry": FAST, **arguments}
        return ServiceClient(http_transport=transport, **fields)

    def bodies(self, path: str) -> list[Any]:
        return [body for request_path, body in self.requests if request_path == path]

    def seq_ids(self) -> list[tuple[str, int]]:
        """Of the training requests, in the order of arrival."""
        return [
            (path, body.seq_id if path == "forward_backward" else body["seq_id"])
            for path, body in self.requests
            if path in ("forward_backward", "optim_step") or path.startswith("save_weights")
        ]

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/")
        with self.lock:
            body = self._body(path, request.content)
            self.requests.append((path, body))
            self.headers.append(request.headers)
            if self.script[path]:
                scripted = self.script[path].pop(0)
                if scripted == DROP:
                    raise httpx.ConnectError("dropped", request=request)
                if isinstance(scripted, int):
                    return httpx.Response(scripted, json={"detail": f"scripted {scripted}"})
                return httpx.Response(200, json=scripted)
            return self._answer(path, body)

    def _body(self, path: str, content: bytes) -> Any:
        if path == "forward_backward":
            return codec.decode_forward_backward_request(content)
        return json.loads(content) if content else None

    def _answer(self, path: str, body: Any) -> httpx.Response:
        if path == "retrieve_future":
            return self.results[body["request_id"]]
        if path.startswith("sessions/"):
            return httpx.Response(200, json={})
        if path.startswith("samplers/"):
            return _json(sampler_id="x", base_model="tiny", tokenizer_id="/tok")
        return getattr(self, "on_" + path.replace("/", "_"))(body)

    def _accepted(self, request_id: str, result: httpx.Response, **more: Any) -> httpx.Response:
        self.results[request_id] = result
        return _json(request_id=request_id, **more)

    def on_client_config(self, _: Any) -> httpx.Response:
        return _json(**self.config)

    def on_create_session(self, _: Any) -> httpx.Response:
        return _json(session_id="S", type="create_session")

    def on_session_heartbeat(self, _: Any) -> httpx.Response:
        return _json(type="session_heartbeat")

    def on_get_server_capabilities(self, _: Any) -> httpx.Response:
        return _json(supported_models=[{"model_name": "tiny", "max_context_length": 64}])

    def on_create_model(self, body: Any) -> httpx.Response:
        model_id = f"S:train:{body['model_seq_id']}"
        return self._accepted(f"create {model_id}", _json(model_id=model_id))

    def on_load_weights(self, body: Any) -> httpx.Response:
        return self._accepted("load", _json(path=body["path"]))

    def on_get_info(self, body: Any) -> httpx.Response:
        data = {"model_name": "tiny", "tokenizer_id": "/tok"}
        return _json(model_id=body["model_id"], model_data=data, lora_rank=8)

    def on_forward_backward(self, body: Any) -> httpx.Response:
        self.executed[body.model_id, body.seq_id] = body
        outputs = [{"logprobs": _logprobs(datum)} for datum in body.data]
        weighted = zip(body.data, outputs, strict=True)
        loss = -sum(float((d.inputs["weights"] * o["logprobs"]).sum()) for d, o in weighted)
        metrics = {"loss:sum": loss, "datums:mean": float(len(body.data))}
        result = codec.encode_train_output(TrainOutput(tuple(outputs), metrics))
        answer = httpx.Response(200, content=result, headers=PROTOBUF)
        return self._accepted(f"fb {body.seq_id}", answer)

    def on_optim_step(self, body: Any) -> httpx.Response:
        self.executed[body["model_id"], body["seq_id"]] = body
        metrics = {"unclipped_grad_l2:mean": 1.0}
        return self._accepted(f"step {body['seq_id']}", _json(metrics=metrics))

    def on_save_weights(self, body: Any) -> httpx.Response:
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        return self._accepted("save", _json(path=path))

    def on_save_weights_for_sampler(self, body: Any) -> httpx.Response:
        if "path" in body:
            path = f"tinker://{body['model_id']}/sampler_weights/{body['path']}"
            return self._accepted("save", _json(path=path))
        session = f"S:sample:{body['sampling_session_seq_id']}"
        return self._accepted("save", _json(sampling_session_id=session))

    def on_create_sampling_session(self, body: Any) -> httpx.Response:
        return _json(sampling_session_id=f"S:sample:{body['sampling_session_seq_id']}")

    def on_asample(self, body: Any) -> httpx.Response:
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        logprobs = np.array([np.nan, *(-token / 10 for token in prompt[1:])], np.float32)
        tokens = np.array([body["seq_id"] % 1_000_000_000, 2], np.int32)
        sequence = SampledSequence(tokens, np.array([-0.5, -1], np.float32), "stop")
        output = SampleOutput(
            (sequence,) * body["num_samples"], logprobs if body.get("prompt_logprobs") else None
        )
        request_id = f"sample {body['seq_id']}"
        ids = [f"{request_id}:{i}" for i in range(body["num_samples"])]
        content = codec.encode_sample_output(output)
        answer = httpx.Response(200, content=content, headers=PROTOBUF)
        return self._accepted(request_id, answer, sample_sequence_ids=ids)


def _json(**fields: Any) -> httpx.Response:
    return httpx.Response(200, json=fields)


def _logprobs(datum: codec.WireDatum) -> np.ndarray:
    return (datum.inputs["target_tokens"] / -10).astype(np.float32)
