"""Weights out and between accounts by both SDKs, against a server process on the fake backend."""

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pyrage
import pytest
import tinker
from tinker import types

import tinker_gmi
from tests import serving
from tinkercloud.storage.keys import KeyStore

MODEL = "fake/tiny"
PROMPT = types.ModelInput.from_ints([1, 2, 3])
DATUM = types.Datum(
    model_input=PROMPT, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3}
)


@dataclass(frozen=True)
class User:
    key: str
    service: tinker.ServiceClient
    rest: tinker.RestClient

    @classmethod
    def connect(cls, server: serving.Server, key: str) -> "User":
        place = {"base_url": server.base_url, "api_key": key}
        return cls(key, tinker.ServiceClient(**place), tinker.RestClient(**place))

    def trained(self) -> tinker.TrainingClient:
        model = self.service.create_lora_training_client(MODEL, rank=8, seed=1).result()
        model.forward_backward([DATUM], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=0.1)).result()
        return model

    def loaded_loss(self, path: str, **options: str) -> float:
        """Of a model made from a checkpoint."""
        model = self.service.create_training_client_from_state(path, **options).result()
        return loss_of(model)


def loss_of(model: tinker.TrainingClient) -> float:
    return model.forward([DATUM], "cross_entropy").result().metrics["loss:sum"]


@pytest.fixture(scope="module")
def users(fake_server: serving.Server) -> Iterator[tuple[User, User]]:
    store = KeyStore(fake_server.data_dir)
    keys = [store.add(name) for name in ("ann", "bob")]
    store.close()
    ann, bob = (User.connect(fake_server, key) for key in keys)
    yield ann, bob
    for user in (ann, bob):
        user.service.close("success").result()


def test_a_published_checkpoint_is_loaded_and_copied_by_another_account(
    users: tuple[User, User],
) -> None:
    ann, bob = users
    model = ann.trained()
    path = model.save_state("shared").result().path
    with pytest.raises(tinker.NotFoundError):
        bob.rest.copy_weights(path, "proj").result()
    ann.rest.publish_checkpoint_from_tinker_path(path).result()
    run_id = path.split("/")[2]
    runs = bob.rest.list_training_runs(access_scope="accessible").result().training_runs
    assert run_id in {run.training_run_id for run in runs}
    [listed] = bob.rest.list_checkpoints(run_id).result().checkpoints
    assert (listed.tinker_path, listed.public) == (path, True)
    copy = bob.rest.copy_weights(path, "proj", ttl_seconds=3600).result()
    ann.rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        bob.rest.get_weights_info_by_tinker_path(path).result()
    assert bob.loaded_loss(copy) == loss_of(model)
    with pytest.raises(tinker.NotFoundError):
        ann.rest.get_weights_info_by_tinker_path(copy).result()


def test_a_key_of_the_owner_loads_and_copies_what_is_private(users: tuple[User, User]) -> None:
    ann, bob = users
    model = ann.trained()
    path = model.save_state("private").result().path
    assert bob.loaded_loss(path, weights_access_token=ann.key) == loss_of(model)
    copy = bob.rest.copy_weights(path, "proj", weights_access_token=ann.key).result()
    assert bob.loaded_loss(copy) == loss_of(model)
    with pytest.raises(tinker.BadRequestError, match="weights_access_token"):
        bob.rest.copy_weights(path, "proj", weights_access_token="tml-wrong").result()


def test_exports_are_downloaded_and_decrypted(users: tuple[User, User]) -> None:
    ann, bob = users
    identity = pyrage.x25519.Identity.generate()
    model = ann.trained()
    plain = model.save_weights_external("plain").result().path
    keys = [str(identity.to_public())]
    secret = model.save_weights_external("secret", age_encryption_recipients=keys).result().path
    files = {}
    for path in (plain, secret):
        urls = ann.rest.get_external_weights_urls(path).result().urls
        files[path] = {name: read(url) for name, url in urls.items()}
        with pytest.raises(tinker.NotFoundError):
            bob.rest.get_external_weights_urls(path).result()
    decrypted = {
        name.removesuffix(".age"): pyrage.decrypt(content, [identity])
        for name, content in files[secret].items()
    }
    assert decrypted == files[plain]


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read()


def test_our_client_exports_too(fake_server: serving.Server) -> None:
    place = {"base_url": fake_server.base_url, "api_key": fake_server.api_key}
    with tinker_gmi.ServiceClient(**place) as service:
        model = service.create_lora_training_client(MODEL, rank=4, seed=1).result(timeout=30)
        saved = model.save_weights_external("out", ttl_seconds=3600).result(timeout=30)
    assert saved.path == f"tinker://{model.model_id}/external_weights/out"
    assert saved.size_bytes is not None
    assert saved.size_bytes > 0
