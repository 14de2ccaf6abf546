"""Whose samples the engine may reuse what it kept for: the user's own, or everyone's."""

from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tinkercloud.core.types import OnTokens, SampleOutput, SampleRequest


def watched(api: Api) -> list[str]:
    """The cache salts that reach the backend from now on."""
    run, salts = api.services.backend.sample, list[str]()

    async def sample(
        version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        salts.append(request.cache_salt)
        return await run(version, request, on_tokens)

    api.services.backend.sample = sample  # type: ignore[method-assign]
    return salts


@pytest.mark.parametrize("shared", [False, True])
async def test_users_share_a_cache_only_where_the_setting_says_so(
    tmp_path: Path, shared: bool
) -> None:
    settings = {"share_prefix_cache": True} if shared else {}
    async with serving(tmp_path, **settings) as ann:
        salts = watched(ann)
        for user in (ann, ann.as_user("bob"), ann):
            await user.result(await user.sample(await user.sampler(await user.session())))
            text = {"model": "fake/tiny", "prompt": [1, 2, 3], "max_tokens": 2}
            answer = await user.http.post("/oai/api/v1/completions", json=text)
            assert answer.status_code == 200, answer.text
        expected = [""] * 6 if shared else ["ann", "ann", "bob", "bob", "ann", "ann"]
        assert salts == expected
