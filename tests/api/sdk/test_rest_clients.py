"""Every public method of RestClient and AdminClient, the official ones and ours, found by looking:
a method of a later SDK fails here until it is covered. The twins ending in _async take the same
arguments."""

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pydantic
import pytest
import tinker
from tinker import types
from tinker.lib.experimental import ExperimentalWarning

import tinker_gmi
from tests.api.thread_server import DATA, PROMPT, thread_server
from tinkercloud.storage.keys import KeyStore

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(f"ignore::{ExperimentalWarning.__module__}.ExperimentalWarning"),
]
CLIENTS = {
    "RestClient": tinker.RestClient,
    "AdminClient": tinker.AdminClient,
    "our RestClient": tinker_gmi.RestClient,
    "our AdminClient": tinker_gmi.AdminClient,
}
HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


@dataclass
class World:
    """A server with one run of ann, which was trained, saved and sampled."""

    base_url: str
    keys: dict[str, str]
    training: tinker.TrainingClient
    sampler_id: str
    external: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def run(self) -> str:
        return self.training.model_id

    @property
    def session_id(self) -> str:
        return self.run.partition(":")[0]

    def saved(self) -> str:
        """The path of a checkpoint of its own."""
        return self.training.save_state(f"state-{next(self._numbers)}").result().path

    def client(self, name: str, user: str = "ann") -> Any:
        return CLIENTS[name](base_url=self.base_url, api_key=self.keys[user])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data_dir = tmp_path_factory.mktemp("rest") / "data"
    with thread_server(data_dir) as (base_url, key):
        store = KeyStore(data_dir)
        keys = {"ann": key, "bob": store.add("bob")}
        store.close()
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        training = service.create_lora_training_client("fake/tiny", rank=4).result()
        training.forward_backward(DATA, "cross_entropy").result()
        path = training.save_weights_for_sampler("s").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result()
        external = training.save_weights_external("e").result()
        yield World(base_url, keys, training, sampler._sampling_session_id, external.path)
        service.close("success").result()


@dataclass(frozen=True)
class Call:
    """arguments(world): of one call. shows(result, world): whether it is the right answer.
    foreign: what another user is told, where the arguments name something."""

    arguments: Callable[[World], tuple[Any, ...]]
    shows: Callable[[Any, World], Any]
    foreign: type[Exception] | None = None


def nothing(world: World) -> tuple[Any, ...]:
    return ()


def optimizer_type(config: Any) -> str:
    return config["type"] if isinstance(config, dict) else config.type


NOT_FOUND = tinker.NotFoundError
CALLS = {
    "assign_session_project": Call(
        lambda w: (w.session_id, "p"), lambda r, w: r is None, NOT_FOUND
    ),
    "copy_weights": Call(
        lambda w: (w.saved(), "p"), lambda r, w: r.startswith("tinker://"), NOT_FOUND
    ),
    "delete_checkpoint": Call(
        lambda w: (w.run, "weights/" + w.saved().rpartition("/")[2]),
        lambda r, w: r is None,
        NOT_FOUND,
    ),
    "delete_checkpoint_from_tinker_path": Call(
        lambda w: (w.saved(),), lambda r, w: r is None, NOT_FOUND
    ),
    "export_session_trace": Call(
        lambda w: (w.session_id,), lambda r, w: r.startswith(w.base_url), NOT_FOUND
    ),
    "get_audit_log": Call(nothing, lambda r, w: "checkpoint_saved" in {e.event for e in r.entries}),
    "get_billing_usage": Call(
        lambda w: (HOUR - timedelta(hours=1), HOUR + timedelta(hours=2)),
        lambda r, w: {"training", "sampling_sample"} <= {e.event_info.type for e in r.data},
    ),
    "get_current_checkpoint_storage_usage": Call(
        nothing, lambda r, w: r.data[0].checkpoint_count >= 1
    ),
    "get_external_weights_urls": Call(
        lambda w: (w.external,), lambda r, w: r.expires > datetime.now(UTC), NOT_FOUND
    ),
    "get_sampler": Call(
        lambda w: (w.sampler_id,), lambda r, w: r.base_model == "fake/tiny", NOT_FOUND
    ),
    "get_server_capabilities": Call(
        nothing, lambda r, w: "fake/tiny" in {m.model_name for m in r.supported_models}
    ),
    "get_session": Call(
        lambda w: (w.session_id,), lambda r, w: w.run in r.training_run_ids, NOT_FOUND
    ),
    "get_telemetry": Call(nothing, lambda r, w: r is None),  # TINKER_TELEMETRY=0
    "get_training_run": Call(
        lambda w: (w.run,), lambda r, w: r.training_run_id == w.run, NOT_FOUND
    ),
    "get_training_run_by_tinker_path": Call(
        lambda w: (w.saved(),), lambda r, w: r.training_run_id == w.run, NOT_FOUND
    ),
    "get_weights_info_by_tinker_path": Call(
        lambda w: (w.saved(),),
        lambda r, w: (r.lora_rank, optimizer_type(r.optimizer_config)) == (4, "adamw"),
        NOT_FOUND,
    ),
    "list_checkpoints": Call(lambda w: (w.run,), lambda r, w: r.checkpoints),
    "list_sessions": Call(nothing, lambda r, w: w.session_id in r.sessions),
    "list_training_runs": Call(
        nothing, lambda r, w: w.run in {run.training_run_id for run in r.training_runs}
    ),
    "list_user_checkpoints": Call(nothing, lambda r, w: r.cursor.total_count > 0),
    "publish_checkpoint_from_tinker_path": Call(
        lambda w: (w.saved(),), lambda r, w: r is None, NOT_FOUND
    ),
    "search_sessions": Call(
        lambda w: (types.SessionSearchRequest(session_id=w.session_id),),
        lambda r, w: [s.session_id for s in r.sessions] == [w.session_id],
    ),
    "set_checkpoint_ttl_from_tinker_path": Call(
        lambda w: (w.saved(), 3600), lambda r, w: r is None, NOT_FOUND
    ),
    "unpublish_checkpoint_from_tinker_path": Call(
        lambda w: (w.saved(),), lambda r, w: r is None, NOT_FOUND
    ),
    "whoami": Call(nothing, lambda r, w: r.user_urn.endswith(":ann")),
}


def methods() -> list[tuple[str, str]]:
    """(client, method) of everything public."""
    return sorted(
        (name, method)
        for name, client in CLIENTS.items()
        for method, _ in inspect.getmembers(client, callable)
        if not method.startswith("_") and method != "close"
    )


def arguments(client: str, call: Call, world: World) -> tuple[Any, ...]:
    """Bodies in the types of the client's own SDK."""
    given = call.arguments(world)
    return tuple(map(in_our_types, given)) if client.startswith("our ") else given


def in_our_types(value: Any) -> Any:
    if not isinstance(value, pydantic.BaseModel):
        return value
    return getattr(tinker_gmi.types, type(value).__name__).model_validate(value.model_dump())


@contextmanager
def opened(world: World, name: str, user: str = "ann") -> Iterator[Any]:
    """A client; ours is closed, the official one shares its connections with others."""
    client = world.client(name, user)
    with client if name.startswith("our ") else nullcontext():
        yield client


def answer(client: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    result = getattr(client, method)(*arguments)
    if inspect.iscoroutine(result):

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())
    return result.result() if hasattr(result, "result") else result


def test_every_public_method_is_called_here() -> None:
    names = {method.removesuffix("_async") for _, method in methods()}
    assert names == set(CALLS)


@pytest.mark.parametrize(("client", "method"), methods())
def test_the_method_answers_its_owner(world: World, client: str, method: str) -> None:
    call = CALLS[method.removesuffix("_async")]
    with opened(world, client) as opened_client:
        result = answer(opened_client, method, arguments(client, call, world))
    assert call.shows(result, world), result


@pytest.mark.parametrize("client", ["RestClient", "our RestClient"])
@pytest.mark.parametrize("method", sorted(name for name, call in CALLS.items() if call.foreign))
def test_another_user_is_told_that_it_does_not_exist(
    world: World, method: str, client: str
) -> None:
    call = CALLS[method]
    error = tinker_gmi.NotFoundError if client.startswith("our ") else call.foreign
    assert error is not None
    with opened(world, client, "bob") as bob, pytest.raises(error, match="does not exist"):
        answer(bob, method, arguments(client, call, world))


@pytest.mark.parametrize("method", ["list_sessions", "list_training_runs", "list_user_checkpoints"])
def test_lists_of_another_user_are_empty(world: World, method: str) -> None:
    result = answer(world.client("RestClient", "bob"), method, ())
    assert not (getattr(result, "sessions", None) or getattr(result, "training_runs", None))
    assert not getattr(result, "checkpoints", None)


@pytest.mark.parametrize("event_type", ["checkpoints", "projects", "organizations"])
def test_the_audit_log_of_another_user_has_nothing_of_mine(world: World, event_type: str) -> None:
    entries = answer(world.client("AdminClient", "bob"), "get_audit_log", (event_type,)).entries
    assert all(entry.event == "api_key_created" for entry in entries)


def test_dimuon_is_refused_with_what_to_use_instead(world: World) -> None:
    service = tinker.ServiceClient(base_url=world.base_url, api_key=world.keys["ann"])
    with pytest.raises(tinker.APIStatusError, match=r"not published.*AdamOptimizerConfig"):
        service.create_lora_training_client(
            "fake/tiny", rank=4, optimizer=tinker.DimuonOptimizerConfig()
        ).result()
    with pytest.raises(tinker.RequestFailedError, match=r"not published.*AdamParams"):
        world.training.optim_step(tinker.DimuonParams(learning_rate=0.1)).result()
    assert world.training.get_info().optimizer_config == types.AdamOptimizerConfig()
    service.close("success").result()
