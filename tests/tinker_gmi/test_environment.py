"""What the client takes from the environment: keys, the project and the tags of a session."""

import pytest

import tinker_gmi as tinker
from tests.mock_api import MockApi
from tests.tinker_gmi.hosted_api import served


def test_a_session_has_the_project_and_the_tags_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_PROJECT_ID", "from the environment")
    monkeypatch.setenv("TINKER_TAGS", "night, sweep,")
    api = MockApi()
    for argument, project in ((None, "from the environment"), ("given", "given")):
        with api.client(project_id=argument) as service:
            service.create_lora_training_client("tiny").result(timeout=10)
        body = api.bodies("create_session")[-1]
        assert (body["project_id"], body["tags"]) == (project, ["night", "sweep"])


def test_credentials_are_a_key_or_a_command_that_prints_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    assert tinker.auth.get_tinker_token() is None
    assert not tinker.auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "exit 1")  # not run
    assert tinker.auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    assert tinker.auth.get_tinker_token() == "tml-key"


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, tinker.AuthenticationError), (402, tinker.BillingError)],
)
def test_a_server_that_refuses_is_told_from_one_that_serves(
    monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    api = MockApi()
    with served(api) as base_url:
        monkeypatch.setenv("TINKER_BASE_URL", base_url)
        tinker.auth.raise_if_tinker_not_accessible()
        api.script["get_server_capabilities"] = [status]
        with pytest.raises(error):
            tinker.auth.raise_if_tinker_not_accessible()


@pytest.mark.parametrize("status", [400, 500])
def test_samples_raise_what_ends_the_poll_of_their_session(status: int) -> None:
    api = MockApi(config={"sample_use_retrieve_futures": True})
    with api.client() as service:
        sampler = service.create_sampling_client(base_model="tiny").result(timeout=10)
        api.script["retrieve_futures"] = [status] * 1000
        sample = sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams())
        with pytest.raises(tinker.APIStatusError, match=str(status)):
            sample.result(timeout=10)
