"""Tokens that stand for keys, what a key says of itself, and who the official client is."""

import base64
import json
import time
from pathlib import Path

import httpx
import pytest
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli as cli

from tests.api.harness import Api, serving
from tests.api.thread_server import PROMPT, thread_server
from tinkercloud.storage import keys as key_store
from tinkercloud.storage.keys import KeyStore
from tinkercloud.storage.tokens import LIFETIME_S, TokenSigner


def decoded(token: str, part: int = 1) -> dict:
    text = token.split(".")[part]
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


async def token_of(api: Api) -> str:
    return (await api.ok("auth/token"))["jwt"]


def shown(api: Api, credential: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app),
        base_url="http://server",
        headers={"X-API-Key": credential},
    )


async def test_a_token_is_as_good_as_its_key(api: Api) -> None:
    token = await token_of(api)
    model = await api.model()
    async with shown(api, token) as client:
        runs = (await client.get("/api/v1/training_runs")).json()["training_runs"]
        assert [run["training_run_id"] for run in runs] == [model]
        again = (await client.post("/api/v1/auth/token", json={})).json()["jwt"]
    assert decoded(again)["key_id"] == decoded(token)["key_id"]


async def test_the_claims_name_user_organization_and_hour(api: Api) -> None:
    claims = decoded(await token_of(api))
    assert claims["sub"] == "tml:organization_user:ann"
    assert (claims["org_id"], claims["email"]) == ("tinkercloud", "")
    assert claims["exp"] - claims["iat"] == LIFETIME_S
    assert abs(claims["iat"] - time.time()) < 10


async def test_users_have_their_own_tokens(api: Api) -> None:
    await api.model()
    async with shown(api, await token_of(api.as_user("bob"))) as client:
        assert (await client.get("/api/v1/training_runs")).json()["training_runs"] == []


async def test_a_token_ends_with_its_key(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_store, "CACHE_S", 0.0)
    token = await token_of(api)
    store = KeyStore(api.services.config.data_dir)  # the command line, in another process
    store.revoke(decoded(token)["key_id"])
    store.close()
    async with shown(api, token) as client:
        response = await client.get("/api/v1/healthz")
    assert response.status_code == 401
    assert 'error="invalid_token"' in response.headers["www-authenticate"]


async def test_a_token_survives_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        token = await token_of(api)
    async with serving(tmp_path) as api, shown(api, token) as client:
        assert (await client.get("/api/v1/healthz")).status_code == 200


async def test_a_token_expires(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    token = await token_of(api)
    now = time.time()
    monkeypatch.setattr("tinkercloud.storage.tokens.time.time", lambda: now + LIFETIME_S + 1)
    async with shown(api, token) as client:
        assert (await client.get("/api/v1/healthz")).status_code == 401


@pytest.mark.parametrize(
    "forge",
    [
        lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
        lambda token: ".".join([encoded({"alg": "none"}), *token.split(".")[1:2], ""]),
        lambda token: ".".join([encoded({"alg": "none"}), *token.split(".")[1:]]),
        lambda token: ".".join(
            [token.split(".")[0], encoded(decoded(token) | {"exp": 9e9}), token.split(".")[2]]
        ),
        lambda token: TokenSigner(b"another server").sign(decoded(token)),
        lambda token: token.rpartition(".")[0],
        lambda _: "eyJ",
        lambda _: "eyJ..",
        lambda _: "eyJ." + "a" * 100_000,
    ],
)
async def test_a_forged_token_is_refused(api: Api, forge) -> None:
    async with shown(api, forge(await token_of(api))) as client:
        assert (await client.get("/api/v1/healthz")).status_code == 401


async def test_a_key_is_no_token_and_gets_no_challenge(api: Api) -> None:
    async with shown(api, "tml-wrong") as client:
        assert "www-authenticate" not in (await client.get("/api/v1/healthz")).headers


async def test_a_key_describes_itself(api: Api) -> None:
    view = (await api.get("auth/apikey/me")).json()
    assert isinstance(view["key_id"], int)
    assert view["details"] == {
        "org_details": {"name": "tinkercloud"},
        "user_details": {"email": "ann"},
    }
    theirs = (await api.as_user("bob").get("auth/apikey/me")).json()
    assert (theirs["key_id"] != view["key_id"], theirs["details"]["user_details"]["email"]) == (
        True,
        "bob",
    )


async def test_only_a_key_for_a_login_revokes_itself(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_store, "CACHE_S", 0.0)
    refusal = await api.http.delete("/api/v1/auth/apikey/me")
    assert refusal.status_code == 403
    assert "tinkercloud keys revoke" in refusal.json()["detail"]
    store = KeyStore(api.services.config.data_dir)
    login = store.add("ann", name="tinker-cli-laptop", note="on the road")
    store.close()
    async with shown(api, login) as client:
        view = (await client.get("/api/v1/auth/apikey/me")).json()
        assert (view["name"], view["note"]) == ("tinker-cli-laptop", "on the road")
        assert (await client.delete("/api/v1/auth/apikey/me")).status_code == 204
        assert (await client.get("/api/v1/healthz")).status_code == 401
    assert (await api.get("healthz")).status_code == 200  # her other key works on


async def test_without_authentication_everybody_has_a_token(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as api:
        assert decoded(await token_of(api))["sub"] == "tml:organization_user:default"
        assert (await api.get("auth/apikey/me")).json()["key_id"] == 0
        assert (await api.http.delete("/api/v1/auth/apikey/me")).status_code == 403


# the official client


def test_the_sdk_knows_who_it_is(tmp_path: Path) -> None:
    with thread_server(tmp_path) as (base_url, key):
        identity = tinker.RestClient(base_url=base_url, api_key=key).whoami().result()
    assert identity.user_urn == "tml:organization_user:ann"
    assert identity.org_urn == "tml:organization:tinkercloud"
    assert identity.email is None


def test_the_sdk_gets_another_token_when_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_server(tmp_path) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        sampler = service.create_sampling_client(base_model="fake/tiny").result()
        before = service.holder._default_auth._token
        plain, refused = TokenSigner.claims, []

        def claims(self, token):
            if token == before:
                refused.append(token)
                return None
            return plain(self, token)

        time.sleep(1.1)  # another second, so another token
        monkeypatch.setattr(TokenSigner, "claims", claims)
        params = tinker.SamplingParams(max_tokens=2)
        assert len(sampler.sample(PROMPT, 1, params).result().sequences) == 1
        assert refused
        service.close("success").result()


def test_the_command_line_logs_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_server(tmp_path / "data") as (base_url, key):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("TINKER_BASE_URL", base_url)
        monkeypatch.delenv("TINKER_API_KEY", raising=False)

        def run(*arguments: str, text: str = "") -> str:
            result = CliRunner().invoke(cli, arguments, input=text, catch_exceptions=False)
            assert result.exit_code == 0, result.output
            return result.output

        assert "Logged in as ann (tinkercloud)" in run("auth", "login", text=f"{key}\n")
        assert json.loads(run("--format", "json", "auth", "whoami"))["user_urn"].endswith(":ann")
        assert "Tinker accessible: yes" in run("auth", "status")
        assert "Removed credential" in run("auth", "logout")
