"""A client of the service: runs its program, as a script on the SDK would, and notes what it sees.

Operations of one model are posted one after another; results are awaited beside. What a client
gives up leaves a gap in the model's numbers.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from tests.simulation.agents import Agent, Known
from tests.simulation.bodies import batch, sample_request, take_number
from tests.simulation.handles import Model, Sampler
from tests.simulation.history import History, Request
from tests.simulation.looks import LINKS, LOOKS, Named, filled
from tests.simulation.schedule import AGENT_WEIGHTS, BASES, Step
from tests.simulation.wires import PROTOBUF, Refused, Wire

_DELETIONS = ("delete_model", "unload_model")


class Client:
    def __init__(
        self, user: str, wire: Wire, agent: Agent, program: tuple[Step, ...], history: History
    ):
        self._user = user
        self._wire = wire
        self._agent = agent
        self._program = program
        self._history = history
        self._session = ""
        self._models: list[Model] = []
        self._num_models = 0
        self._num_samplers = 0
        self._names = 0
        self._samplers: list[Sampler] = []
        self._polls: list[asyncio.Task[None]] = []
        self._last_sample: Request | None = None

    async def run(self) -> None:
        """Ends when the program has, and every result is there."""
        try:
            await self._wire.post("client/config", b'{"sdk_version":"0.38.0"}')
            session = await self._wire.post("create_session", b'{"tags":[]}')
            self._session = session["session_id"]
            for step in self._program:
                await self._do(step)
        except Refused:  # without a session a script ends
            pass
        for poll in self._polls:
            await poll

    async def _do(self, step: Step) -> None:
        await self._actions().get(step.kind, self._operate)(step)

    def _actions(self) -> dict[str, Callable[[Step], Awaitable[None]]]:
        return {
            "forward_backward": self._forward_backward,
            "forward": self._forward_backward,
            "take_number": self._take_number,
            "sample": self._sample,
            "cancel": self._cancel,
            "create_model": self._create_model,
            "create_from_state": self._create_from_state,
            "sampler_of_path": self._sampler_of_path,
            "sampler_of_base": self._sampler_of_base,
            "delete_model": self._delete_model,
            "delete_checkpoint": self._delete_checkpoint,
            "finish_session": self._finish_session,
            "list": self._list,
            "look": self._look,
            "intrude": self._intrude,
            **dict.fromkeys(AGENT_WEIGHTS, self._have_agent_do),
            "wait": self._wait,
            "pause": self._pause,
        }

    # ---- numbered requests

    async def _submit(
        self, request: Request, path: str, content: bytes, kind: str = "application/json"
    ) -> "asyncio.Task[None] | None":
        """Post it; the task that waits for its result, None where it was given up."""
        request.post = (path, content, kind)
        self._history.requests.append(request)
        try:
            acknowledgement = await self._wire.post(path, content, kind)
        except Refused as refusal:
            request.refusal = str(refusal)
            return None
        request.request_ids.append(acknowledgement["request_id"])
        poll = asyncio.ensure_future(self._poll(request))
        self._polls.append(poll)
        return poll

    async def _poll(self, request: Request) -> None:
        try:
            request.results.append(await self._wire.result(request.request_ids[0]))
        except Refused as refusal:
            if refusal.status:
                request.lost = str(refusal)

    def _model(self, step: Step) -> Model | None:
        return self._models[step.target % len(self._models)] if self._models else None

    def _request(self, step: Step, model: Model) -> Request:
        number = model.next_seq_id
        model.next_seq_id += 1
        return Request(self._user, step.kind, model.model_id, number, {})

    async def _forward_backward(self, step: Step) -> None:
        """Chunks 2 to n at once, chunk 1 when these are acknowledged."""
        model = self._model(step)
        if model is not None:
            await self._pass(step, model)

    async def _pass(self, step: Step, model: Model) -> None:
        numbers = random.Random(step.seed)
        requests = [self._request(step, model) for _ in range(step.size)]
        posts = []
        for request in requests:
            content = batch(request, numbers, forward_only=step.kind == "forward")
            posts.append((request, "forward_backward", content, PROTOBUF))
        await asyncio.gather(*(self._submit(*post) for post in posts[1:]))
        await self._submit(*posts[0])

    async def _operate(self, step: Step) -> None:
        model = self._model(step)
        if model is None:
            return
        if step.kind == "load_into" and not model.saved:
            return
        request = self._request(step, model)
        path, body = self._operation(step, model)
        body |= {"model_id": model.model_id, "seq_id": request.seq_id}
        request.body |= body
        poll = await self._submit(request, path, json.dumps(body).encode())
        if poll is None:
            return
        if step.kind == "save_state" and not step.overwrite:
            model.saved.append((f"tinker://{model.model_id}/weights/{body['path']}", poll, request))
        if step.kind == "export" and await self._succeeds(poll, request):
            run = f"training_runs/{model.model_id}/checkpoints/external_weights/{body['path']}"
            await self._look_at(f"{run}/external_weights_urls")
        if step.kind in ("snapshot", "inflight"):
            self._add_sampler(request, self._succeeds(poll, request))

    async def _take_number(self, step: Step) -> None:
        await take_number(self._history, self._wire, self._user, step)

    def _operation(self, step: Step, model: Model) -> tuple[str, dict[str, Any]]:
        self._names += 1
        match step.kind:
            case "optim_step":
                rate = (step.seed % 100 + 1) / 100
                return "optim_step", {"adam_params": {"learning_rate": rate}}
            case "save_state":
                name = "again" if step.overwrite else f"s{self._names}"
                body = {"path": name, "overwrite": step.overwrite}
                if step.ttl_s:
                    body["ttl_seconds"] = step.ttl_s
                    self._history.removed[f"tinker://{model.model_id}/weights/{name}"] = False
                return "save_weights", body
            case "save_sampler":
                return "save_weights_for_sampler", {"path": f"w{self._names}"}
            case "export":
                return "save_weights_external", {"path": f"e{self._names}"}
            case "load_into":
                path, _, _ = model.saved[step.seed % len(model.saved)]
                return "load_weights", {"path": path, "optimizer": step.overwrite}
            case _:
                self._num_samplers += 1
                body = {"sampling_session_seq_id": self._num_samplers - 1, "kind": step.kind}
                return "save_weights_for_sampler", body

    async def _succeeds(self, poll: "asyncio.Task[None]", request: Request) -> bool:
        await asyncio.wait([poll])
        return bool(request.results) and request.results[0][0] == "completed"

    # ---- models and samplers

    async def _create_model(self, step: Step) -> None:
        body = {"base_model": BASES[step.seed % len(BASES)], "lora_config": {"rank": 4, "seed": 1}}
        await self._new_model(step, "create_model", body)

    async def _create_from_state(self, step: Step) -> None:
        saved = [each for model in self._models for each in model.saved]
        if not saved:
            return
        path, poll, request = saved[step.seed % len(saved)]
        if await self._succeeds(poll, request):
            body = {"path": path, "optimizer": step.overwrite}
            await self._new_model(step, "load_weights", body)

    async def _new_model(self, step: Step, path: str, body: dict[str, Any]) -> None:
        number, self._num_models = self._num_models, self._num_models + 1
        body |= {"session_id": self._session, "model_seq_id": number}
        model_id = f"{self._session}:train:{number}"
        self._history.models[model_id] = self._user
        request = Request(self._user, step.kind, model_id, 0, dict(body))
        poll = await self._submit(request, path, json.dumps(body).encode())
        if poll is None:
            return
        if step.seed % 3 and not await self._succeeds(poll, request):
            return  # a script that waits, and is told that there is no such model
        self._models.append(Model(model_id))

    def _add_sampler(self, named: str | Request, ready: Any) -> None:
        task = asyncio.ensure_future(ready)
        self._polls.append(task)
        self._samplers.append(Sampler(named, task))

    async def _sampler_of_path(self, step: Step) -> None:
        """Of sampler weights that were saved, or of a training state."""
        paths = [
            json.loads(request.results[0][2])["path"]
            for request in self._history.requests
            if request.user == self._user
            and request.kind in ("save_sampler", "save_state")
            and not request.body.get("overwrite")
            and is_done(request)
        ]
        if paths:
            await self._new_sampler({"model_path": paths[step.seed % len(paths)]})

    async def _sampler_of_base(self, step: Step) -> None:
        await self._new_sampler({"base_model": BASES[step.seed % len(BASES)]})

    async def _new_sampler(self, weights: dict[str, Any]) -> None:
        number, self._num_samplers = self._num_samplers, self._num_samplers + 1
        body = {"session_id": self._session, "sampling_session_seq_id": number, **weights}
        try:
            await self._wire.post("create_sampling_session", json.dumps(body).encode())
        except Refused:
            return
        sampler_id = f"{self._session}:sample:{number}"
        self._history.samplers[sampler_id] = weights
        self._add_sampler(sampler_id, _at_once())

    async def _sample(self, step: Step) -> None:
        if not self._samplers:
            return
        sampler = self._samplers[step.target % len(self._samplers)]
        if not await sampler.ready:
            return
        number, sampler.next_seq_id = sampler.next_seq_id, sampler.next_seq_id + 1
        request = sample_request(self._user, sampler.sampler_id, number, step)
        await self._submit(request, *request.post)
        self._last_sample = request

    async def _cancel(self, step: Step) -> None:
        sample = self._last_sample
        if sample is not None and sample.is_acknowledged:
            body = json.dumps({"request_id": sample.request_ids[0]}).encode()
            await self._leniently(self._wire.post("cancel_future", body))

    # ---- the rest

    async def _delete_model(self, step: Step) -> None:
        """Another script looks at it meanwhile, and a third one goes on with it."""
        model = self._model(step)
        if model is None:
            return
        self._models.remove(model)
        self._history.deleted[model.model_id] = False
        body = json.dumps({"model_id": model.model_id}).encode()
        looks = [self._leniently(self._wire.post("get_info", body)) for _ in range(step.size)]
        is_told, *_ = await asyncio.gather(
            self._told(self._wire.post(_DELETIONS[step.seed % 2], body)), *looks
        )
        if is_told:
            self._history.deleted[model.model_id] = True
            if await self._leniently(self._wire.post("get_info", body)) is not None:
                self._history.found_deleted.append(model.model_id)
            await self._pass(replace(step, kind="forward_backward"), model)

    async def _delete_checkpoint(self, step: Step) -> None:
        """Of one that was waited for; others may load it meanwhile."""
        saved = [each for model in self._models for each in model.saved]
        saved = [each for each in saved if each[0] not in self._history.by_name]
        if not saved:
            return
        path, poll, request = saved[step.seed % len(saved)]
        if await self._succeeds(poll, request):
            self._history.removed.setdefault(path, False)
            run, segment, name = path.removeprefix("tinker://").split("/")
            call = self._wire.delete(f"training_runs/{run}/checkpoints/{segment}/{name}")
            # Not a 404: a checkpoint that had expired comes back where the clock is set back.
            if await self._told(call, is_gone_enough=False):
                self._history.removed[path] = True

    async def _finish_session(self, step: Step) -> None:
        self._history.finished.add(self._session)
        own = [each for each, user in self._history.models.items() if user == self._user]
        for model_id in own:
            self._history.deleted.setdefault(model_id, False)
        body = json.dumps({"reason": {"type": "completed"}}).encode()
        if await self._told(self._wire.post(f"sessions/{self._session}/finish", body)):
            self._history.deleted.update(dict.fromkeys(own, True))

    async def _told(self, call: Awaitable[object], *, is_gone_enough: bool = True) -> bool:
        """Whether the server said that it is done, or had done it when it was asked again."""
        try:
            await call
        except Refused as refusal:
            return is_gone_enough and refusal.status == 404
        return True

    async def _list(self, step: Step) -> None:
        runs = await self._leniently(self._wire.get("training_runs?limit=100&offset=0"))
        if runs is not None:
            seen = {run["training_run_id"] for run in runs["training_runs"]}
            self._history.listed.append((self._user, seen))

    async def _look(self, step: Step) -> None:
        model, saved = self._model(step), [s for m in self._models for s in m.saved]
        path = saved[step.seed % len(saved)][0] if saved else "tinker://"
        run, _, name = path.removeprefix("tinker://").partition("/weights/")
        samplers = [each.sampler_id for each in self._samplers]
        asked = [id_ for each in self._history.requests for id_ in each.request_ids]
        named = Named(
            *(self._session, "" if model is None else model.model_id),
            *(samplers[step.target % len(samplers)] if samplers else "", run, name),
            asked[-1] if asked else "",
        )
        look = LOOKS[step.seed % len(LOOKS)]
        request = filled(look, named)
        if request is None:
            return
        path, body = request
        match look.method:
            case "get":
                await self._look_at(path)
            case "delete":
                await self._told(self._wire.delete(path))
            case "put":
                await self._told(self._wire.put(path, body))
            case _:
                await self._leniently(self._wire.post(path, body))

    async def _look_at(self, path: str) -> None:
        if path.endswith(LINKS):
            await self._agent.fetch(f"/api/v1/{path}")
        else:
            await self._leniently(self._wire.get(path))

    async def _intrude(self, step: Step) -> None:
        """Ask for another user's result, and train another's model."""
        others = [each for each in self._history.requests if each.user != self._user]
        known = [each for each in others if each.is_acknowledged]
        if not known:
            return
        request = known[step.seed % len(known)]
        body = json.dumps({"request_id": request.request_ids[0]}).encode()
        answer = await self._leniently(self._wire.post("retrieve_future", body))
        if answer is not None:
            self._history.intrusions.append(f"{self._user} reads {request.kind} of {request.user}")

    def _known(self) -> Known:
        ready = [each for each in self._samplers if each.ready.done() and each.ready.result()]
        samplers = [each.sampler_id for each in ready]
        paths = [path for model in self._models for path, _, _ in model.saved]
        runs = [model.model_id for model in self._models]
        names = [*BASES, *samplers, *paths, *(f";{path}" for path in paths)]
        return Known(names, samplers, runs)

    async def _have_agent_do(self, step: Step) -> None:
        """Beside what follows."""
        self._polls.append(asyncio.ensure_future(self._agent.do(step, self._known())))

    async def _leniently(self, call: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return await call
        except Refused:
            return None

    async def _wait(self, step: Step) -> None:
        for poll in list(self._polls):
            await poll

    async def _pause(self, step: Step) -> None:
        await asyncio.sleep(step.size * 2.0)


async def _at_once() -> bool:
    return True


def is_done(request: Request) -> bool:
    return bool(request.results) and request.results[0][0] == "completed"
