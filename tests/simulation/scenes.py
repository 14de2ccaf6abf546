"""What few scripts do, several calls in turn each: sharing checkpoints, training on samples that
are on record, losses of their own, copies, downloads."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from tests.simulation.bodies import custom_loss, prompt_of, record_batch, sample_request
from tests.simulation.client import Client, is_done
from tests.simulation.handles import Sampler
from tests.simulation.looks import LOSS
from tests.simulation.schedule import BASES, SCENES, Step
from tests.simulation.wires import PROTOBUF

FIRST_COPY = 10**6
"""Among the numbers of a session's models, which scripts count from 0 on."""
MUCH = 4200
"""Tokens: more than a model has room for, and than are counted on the event loop."""
SILENT_S = (130.0, 130.0, 700.0)
"""After 120 s without heartbeats a session's client is thought to be gone, and after 600 s
published weights may go that are not sampled."""
SHARED_S = 6.0


class Player(Client):
    """A client whose program has scenes too."""

    _num_copies = 0
    _num_losses = 0

    def _actions(self) -> dict[str, Callable[[Step], Awaitable[None]]]:
        return {**super()._actions(), "scene": self._play}

    async def _play(self, step: Step) -> None:
        scene: Callable[[Step], Awaitable[None]] = getattr(self, f"_{scene_of(step)}")
        await scene(step)

    def _beside(self, scene: Awaitable[None]) -> None:
        """Of what the program does next."""
        self._polls.append(asyncio.ensure_future(scene))

    async def _saved(self, step: Step) -> str | None:
        """The path of a state that is there, or was; saved now where there is none."""
        if not any(model.saved for model in self._models):
            await self._operate(replace(step, kind="save_state", overwrite=False, ttl_s=0))
        saved = [each for model in self._models for each in model.saved]
        if not saved:
            return None
        path, poll, request = saved[step.seed // 16 % len(saved)]
        return path if await self._succeeds(poll, request) else None

    async def _sampler(self, step: Step) -> Sampler | None:
        """One that the server has; of a base model where there is none."""
        if not self._samplers:
            await self._sampler_of_base(step)
        if not self._samplers:
            return None
        sampler = self._samplers[step.target % len(self._samplers)]
        return sampler if await sampler.ready else None

    # ---- checkpoints of others

    async def _share(self, step: Step) -> None:
        """For a while, or for good."""
        path = await self._saved(step)
        if path is not None:
            self._history.shared[path] = self._user
            self._beside(self._shared(f"{_place(path)}/publish", step))

    async def _shared(self, place: str, step: Step) -> None:
        await self._leniently(self._wire.post(place, b"{}"))
        if step.overwrite:
            return
        await asyncio.sleep(SHARED_S * step.size)
        await self._told(self._wire.delete(place))

    async def _of_others(self, step: Step) -> str | None:
        """One that its owner shares, if need be because it is asked."""
        shared = [path for path, user in self._history.shared.items() if user != self._user]
        saved = [
            (f"tinker://{each.owner}/weights/{each.body['path']}", each.user)
            for each in self._history.requests
            if each.user != self._user
            and each.kind == "save_state"
            and is_done(each)
            and not each.body["overwrite"]
        ]
        if not shared and saved:
            path, owner = saved[step.seed // 16 % len(saved)]
            await self._agent.have_shared(f"/api/v1/{_place(path)}/publish", owner)
            self._history.shared[path] = owner
            return path
        return shared[step.seed // 16 % len(shared)] if shared else None

    async def _borrow(self, step: Step) -> None:
        path = await self._of_others(step)
        if path is None:
            return
        run = path.removeprefix("tinker://").partition("/")[0]
        await self._post("weights_info", {"tinker_path": path})
        for look in (f"{run}?access_scope=accessible", f"{run}/checkpoints"):
            await self._look_at(f"training_runs/{look}")
        await self._look_at(f"{_place(path)}/archive")
        self._history.removed.setdefault(path, False)  # its owner may take it back
        await self._new_sampler({"model_path": path})
        await self._sample(replace(step, target=len(self._samplers) - 1))

    async def _copy(self, step: Step) -> None:
        """By a key that its owner lends; twice at once, as of a client that is in a hurry, and
        while a model is saved."""
        own, other = await self._saved(step), await self._of_others(step)
        path = own if other is None or step.overwrite else other
        if path is None:
            return
        self._num_copies += 1
        body: dict[str, Any] = {
            "source_path": path,
            "session_id": self._session,
            "model_seq_id": FIRST_COPY + self._num_copies,
        }
        if path == other:
            body["weights_access_token"] = self._agent.keys[self._history.shared[path]]
        saves = self._operate(replace(step, kind="save_state", ttl_s=0))
        await asyncio.gather(saves, *(self._post("copy_weights", body) for _ in range(2)))
        await self._post("copy_weights", body)

    async def _load_by_name(self, step: Step) -> None:
        """Of what the model has saved, by the name alone."""
        path, model = await self._saved(step), self._model(step)
        if model is None or path is None or not path.startswith(f"tinker://{model.model_id}/"):
            return
        if path in self._history.removed:
            return
        self._history.by_name.add(path)
        request = self._request(replace(step, kind="load_into"), model)
        request.body |= {"path": path, "optimizer": step.overwrite}
        name = path.rpartition("/")[2]
        sent = {**request.body, "path": name, "model_id": model.model_id, "seq_id": request.seq_id}
        self._history.removed.setdefault(name, False)  # an error says it as it was asked for
        await self._submit(request, "load_weights", json.dumps(sent).encode())

    # ---- losses

    async def _train_with_loss(self, step: Step) -> None:
        """Of the script's own. The fake backend refuses it, in the model's order."""
        self._num_losses += 1
        text = LOSS.replace("{session}", self._session)
        body = json.loads(text) | {"custom_loss_seq_id": self._num_losses}
        created = await self._post("create_custom_loss", body)
        model = self._model(step)
        if created is None or model is None:
            return
        status, _, _ = await self._wire.result(created["request_id"])
        if status == "completed":
            request = self._request(replace(step, kind="forward_backward"), model)
            loss_id = f"{self._session}:loss:{self._num_losses}"
            request.custom_loss = json.dumps({k: body[k] for k in ("name", "inputs", "graph")})
            await self._submit(request, "forward_backward", custom_loss(request, loss_id), PROTOBUF)

    async def _train_on_record(self, step: Step) -> None:
        """On a sample, whose tokens and log-probabilities the server keeps."""
        model, sampler = self._model(step), await self._sampler(step)
        if sampler is None or model is None:
            return
        number, sampler.next_seq_id = sampler.next_seq_id, sampler.next_seq_id + 1
        sample = sample_request(
            self._user, sampler.sampler_id, number, step, record_stability_info=True
        )
        poll = await self._submit(sample, *sample.post)
        if poll is None or not await self._succeeds(poll, sample):
            return
        request = self._request(replace(step, kind="forward_backward"), model)
        content = record_batch(request, sample, random.Random(step.seed))
        await self._submit(request, "forward_backward", content, PROTOBUF)

    # ---- samples

    async def _sample_without_session(self, step: Step) -> None:
        path = await self._saved(step)
        weights = {"base_model": BASES[step.target % len(BASES)]}
        if path is not None and step.size > 1:
            weights = {"model_path": path}
        owner = f"of {weights} by {self._user}"
        self._history.samplers[owner] = weights
        named = {"sampling_session_id": None, **weights}
        request = sample_request(self._user, owner, None, step, **named)
        await self._submit(request, *request.post)

    async def _ask_too_much(self, step: Step) -> None:
        sampler = await self._sampler(step)
        if sampler is not None:
            number, sampler.next_seq_id = sampler.next_seq_id, sampler.next_seq_id + 1
            prompt = prompt_of([1] * MUCH)
            request = sample_request(self._user, sampler.sampler_id, number, step, prompt=prompt)
            await self._submit(request, *request.post)

    async def _join_twice(self, step: Step) -> None:
        sampler = await self._sampler(step)
        if sampler is not None:
            body = {"sampling_session_id": sampler.sampler_id}
            joins = (self._post("join_sampling_session", body) for _ in range(2))
            answers = await asyncio.gather(*joins)
            given = [each["client_counter"] for each in answers if each is not None]
            if len(set(given)) < len(given):
                self._history.wrong.append(f"two clients of {sampler.sampler_id} are {given}")
        body = {"session_id": self._session, "base_model": BASES[0]}
        await self._post("create_sampling_client", body)

    # ---- what is read

    async def _download(self, step: Step) -> None:
        path = await self._saved(step)
        if path is not None:
            await self._look_at(f"{_place(path)}/archive")

    async def _fall_silent(self, step: Step) -> None:
        await asyncio.sleep(SILENT_S[step.size - 1])
        await self._look_at("sessions?limit=20&offset=0")
        await self._agent.fetch("/sessions")
        await self._post("sessions/search", {})

    async def _read_twice(self, step: Step) -> None:
        """At once, in two windows."""
        model = self._model(step)
        if model is not None:
            page = f"/console/runs/{model.model_id}/events"
            await asyncio.gather(*(self._agent.fetch(page) for _ in range(2)))
        known = [each for each in self._history.requests if each.user == self._user]
        finished = [each.request_ids[0] for each in known if each.results]
        if finished:
            path = f"/api/v1/retrieve_future/{finished[step.seed // 16 % len(finished)]}"
            await asyncio.gather(*(self._agent.fetch(path) for _ in range(3)))
        for page in ("/console/samples", "/readyz"):
            await self._agent.fetch(page)

    async def _be_rewarded(self, step: Step) -> None:
        self._beside(self._agent.be_rewarded(step, self._known()))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return await self._leniently(self._wire.post(path, json.dumps(body).encode()))


def scene_of(step: Step) -> str:
    return SCENES[step.seed % len(SCENES)]


def _place(path: str) -> str:
    run, segment, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{segment}/{name}"
