"""Weights out: exports, their signed links, archives."""

import io
import logging
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pyrage
import pytest

from tests.api.checkpoints.calls import publish, unpublish, url
from tests.api.harness import Api, serving
from tinkercloud.services.accounts import signed_links
from tinkercloud.services.checkpoints.checkpoint_writer import FOLDER


async def exported(api: Api, name: str = "ext", **fields: Any) -> str:
    """The path of an export of a model after one step."""
    model_id = await api.model(lora_config={"rank": 8, "seed": 4})
    await api.train(model_id, 1)
    accepted = await api.ok(
        "save_weights_external", model_id=model_id, path=name, seq_id=3, **fields
    )
    result = await api.result(accepted)
    assert result["path"] == f"tinker://{model_id}/external_weights/{name}"
    assert result["size_bytes"] > 0
    return result["path"]


async def urls(api: Api, path: str) -> dict[str, str]:
    response = await api.http.get(url(path, "/external_weights_urls"))
    assert response.status_code == 200, response.text
    return response.json()["urls"]


async def fetch(api: Api, link: str, **headers: str) -> httpx.Response:
    """Without a key, as SDKs do."""
    transport = httpx.ASGITransport(app=api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as stranger:
        return await stranger.get(link, headers=headers)


def changed(link: str, **query: str) -> str:
    parts = urlsplit(link)
    pairs = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return parts._replace(query=urlencode(pairs | query)).geturl()


def on_disk(api: Api, path: str) -> dict[str, bytes]:
    run, segment, name = path.removeprefix("tinker://").split("/")
    [folder] = (api.services.config.data_dir / FOLDER / run / segment / name).iterdir()
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_an_export_is_downloaded_by_its_links_without_a_key(api: Api) -> None:
    path = await exported(api)
    links = await urls(api, path)
    assert links
    files = on_disk(api, path)
    assert {*links, "manifest.json"} == {*files}
    for name, link in links.items():
        response = await fetch(api, link)
        assert response.content == files[name]
        assert response.headers["content-length"] == str(len(files[name]))


async def test_a_link_gives_ranges(api: Api) -> None:
    path = await exported(api)
    [(name, link)] = (await urls(api, path)).items()
    content = on_disk(api, path)[name]
    response = await fetch(api, link, Range="bytes=10-19")
    assert (response.status_code, response.content) == (206, content[10:20])
    assert response.headers["content-range"] == f"bytes 10-19/{len(content)}"
    assert (await fetch(api, link, Range=f"bytes={len(content)}-")).status_code == 416


async def test_exports_are_listed_as_external(api: Api) -> None:
    path = await exported(api, ttl_seconds=3600)
    [listed] = (await api.get("checkpoints")).json()["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "external")
    assert "expires_at" in listed


async def test_an_export_cannot_be_trained_or_sampled_here(api: Api) -> None:
    path = await exported(api)
    session_id = await api.session()
    loading = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": False}
    refused = await api.post("load_weights", **loading)
    assert (refused.status_code, "export" in refused.json()["detail"]) == (422, True)
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    assert (await api.post("create_sampling_session", **sampling)).status_code == 422


@pytest.mark.parametrize(
    "query",
    [
        {"expires": "99999999999"},
        {"expires": "-1"},
        {"expires": "soon"},
        {"reader": "bob"},
        {"signature": "0" * 64},
        {"signature": "\N{LATIN SMALL LETTER E WITH ACUTE}"},
        {"signature": ""},
    ],
    ids=str,
)
async def test_a_changed_link_is_refused(api: Api, query: Mapping[str, str]) -> None:
    for link in (await urls(api, await exported(api))).values():
        assert (await fetch(api, changed(link, **query))).status_code == 404


async def test_a_link_is_good_for_its_file_alone(api: Api) -> None:
    path = await exported(api)
    other = await exported(api)
    [link] = (await urls(api, path)).values()
    [of_other] = (await urls(api, other)).values()
    parts, other_parts = urlsplit(link), urlsplit(of_other)
    for forged in (
        parts._replace(path=other_parts.path),
        parts._replace(path=f"{parts.path.rpartition('/')[0]}/manifest.json"),
        parts._replace(path=f"{parts.path.rpartition('/')[0]}/archive.tar"),
        parts._replace(path=f"{parts.path.rpartition('/')[0]}/..%2f..%2fmanifest.json"),
    ):
        assert (await fetch(api, forged.geturl())).status_code == 404
    assert (await fetch(api, link)).status_code == 200


async def test_a_link_ends(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await exported(api)
    [link] = (await urls(api, path)).values()
    now = signed_links.time.time()
    monkeypatch.setattr(signed_links.time, "time", lambda: now + signed_links.LIFETIME_S + 1)
    assert (await fetch(api, link)).status_code == 404


async def test_a_link_of_a_deleted_export_leads_nowhere(api: Api) -> None:
    path = await exported(api)
    [link] = (await urls(api, path)).values()
    assert (await api.http.delete(url(path))).status_code == 204
    assert (await fetch(api, link)).status_code == 404


async def test_links_outlive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        path = await exported(api)
        [link] = (await urls(api, path)).values()
    async with serving(tmp_path) as api:
        assert (await fetch(api, link)).status_code == 200


async def test_the_secret_of_links_is_in_a_file_of_the_servers_user_alone(api: Api) -> None:
    await urls(api, await exported(api))
    rows = await api.services.database.all("SELECT name, value FROM secrets")
    assert [len(row["value"]) for row in rows if row["name"] == "signed links"] == [32]
    assert _mode(api.services.config.data_dir / "tinkercloud.db") == 0o600


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_links_name_the_public_url_where_one_is_set(tmp_path: Path) -> None:
    async with serving(tmp_path, public_url="https://gpu.example.org/tinker/") as api:
        [link] = (await urls(api, await exported(api))).values()
    assert link.startswith("https://gpu.example.org/tinker/api/v1/signed/")


async def test_others_get_no_links_unless_it_is_published(api: Api) -> None:
    path = await exported(api)
    bob = api.as_user("bob")
    for verb in ("/external_weights_urls", "/archive"):
        assert (await bob.http.get(url(path, verb))).status_code == 404
    await publish(api, path)
    [link] = (await urls(bob, path)).values()
    assert (await fetch(bob, link)).status_code == 200
    await unpublish(api, path)
    assert (await fetch(bob, link)).status_code == 404
    assert (await bob.http.get(url(path, "/external_weights_urls"))).status_code == 404


async def test_other_checkpoints_have_no_external_urls(api: Api) -> None:
    model_id = await api.model()
    await api.result(await api.ok("save_weights", model_id=model_id, path="ck", seq_id=1))
    response = await api.http.get(url(f"tinker://{model_id}/weights/ck", "/external_weights_urls"))
    assert response.status_code == 422
    assert "save_weights_external" in response.json()["detail"]


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
async def test_an_archive_is_a_tar_behind_a_redirect(api: Api, kind: str) -> None:
    model_id = await api.model()
    accepted = await api.ok(kind, model_id=model_id, path="ck", seq_id=1)
    path = (await api.result(accepted))["path"]
    response = await api.http.get(url(path, "/archive"))
    assert response.status_code == 302
    assert response.json()["url"] == response.headers["location"]
    assert response.headers["expires"].endswith("GMT")
    content = await fetch(api, response.headers["location"])
    assert content.headers["content-length"] == str(len(content.content))
    with tarfile.open(fileobj=io.BytesIO(content.content)) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    files = on_disk(api, path)
    files.pop("manifest.json")
    assert members == files


async def test_an_export_is_encrypted_to_its_recipients(api: Api) -> None:
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    recipients = [str(identity.to_public()) for identity in identities]
    path = await exported(api, age_encryption_recipients=recipients)
    links = await urls(api, path)
    assert all(name.endswith(".age") for name in links)
    plain = on_disk(api, await exported(api))
    for name, link in links.items():
        content = (await fetch(api, link)).content
        for identity in identities:
            assert pyrage.decrypt(content, [identity]) == plain[name.removesuffix(".age")]
    assert {name.removesuffix(".age") for name in on_disk(api, path)} == {*plain}
    assert not {*on_disk(api, path)} & ({*plain} - {"manifest.json"})


@pytest.mark.parametrize(
    ("recipients", "text"),
    [
        (["age1nothing"], "age_encryption_recipients[0]"),
        ([str(pyrage.x25519.Identity.generate().to_public())] * 11, "10 are the most"),
        (["x" * 10_000], "age_encryption_recipients[0]"),
    ],
    ids=["no key", "too many", "too long"],
)
async def test_wrong_recipients_are_refused_by_name(
    api: Api, recipients: list[str], text: str
) -> None:
    model_id = await api.model()
    body = {"model_id": model_id, "path": "e", "seq_id": 1}
    accepted = await api.ok("save_weights_external", **body, age_encryption_recipients=recipients)
    assert text in await api.failure(accepted)
    assert (await api.get("checkpoints")).json()["checkpoints"] == []


async def test_a_secret_key_in_place_of_a_recipient_is_not_repeated(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = str(pyrage.x25519.Identity.generate())
    body = {"model_id": await api.model(), "path": "e", "seq_id": 1}
    accepted = await api.ok("save_weights_external", **body, age_encryption_recipients=[secret])
    assert secret not in await api.failure(accepted)
    assert secret not in caplog.text


async def test_an_export_comes_in_the_models_order(api: Api) -> None:
    model_id = await api.model()
    body = {"model_id": model_id, "path": "late", "seq_id": 3}
    late = await api.ok("save_weights_external", **body)
    await api.train(model_id, 1)
    late = (await api.result(late))["path"]
    accepted = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=4)
    after = (await api.result(accepted))["path"]
    trained, exported_files = on_disk(api, after), on_disk(api, late)
    assert {n: c for n, c in trained.items() if n != "manifest.json"} == {
        n: c for n, c in exported_files.items() if n != "manifest.json"
    }


async def test_an_exports_name_is_checked_and_taken_once(api: Api) -> None:
    model_id = await api.model()
    body = {"model_id": model_id, "path": "../up", "seq_id": 1}
    assert "not allowed" in await api.failure(await api.ok("save_weights_external", **body))
    for seq_id in (2, 3):
        last = await api.ok("save_weights_external", model_id=model_id, path="e", seq_id=seq_id)
    assert "exists already" in await api.failure(last)


async def test_another_users_model_cannot_be_exported(api: Api) -> None:
    model_id = await api.model()
    response = await api.as_user("bob").post(
        "save_weights_external", model_id=model_id, path="e", seq_id=1
    )
    assert response.status_code == 404
