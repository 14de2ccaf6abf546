"""What a pool's model is drafted for by: llama-server's arguments, and what people are told."""

from pathlib import Path

import pytest

from tests.pool.pools import fake_programs, write_pool
from tests.pool.test_running import server_arguments, started
from tinkercloud.errors import ConfigError
from tinkercloud.pool import drafting
from tinkercloud.pool.drafting import draft_arguments, draft_text
from tinkercloud.pool.model_file import ModelFile, read_model_file
from tinkercloud.pool.pool_file import Model


def test_without_a_draft_llama_server_is_asked_for_none(smollm2_gguf: Path) -> None:
    model = Model(name="m", path=smollm2_gguf)
    assert draft_arguments(model) == [] and draft_text(model) == ""


def test_a_draft_model_stays_on_the_coordinator(smollm2_gguf: Path) -> None:
    model = Model(name="m", path=smollm2_gguf, draft=smollm2_gguf, drafted_tokens=32)
    arguments = draft_arguments(model)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert given["--spec-draft-model"] == str(smollm2_gguf)
    assert given["--spec-draft-device"] == "none" and given["--spec-draft-n-max"] == "32"
    assert "up to 32 tokens a pass" in draft_text(model)


def test_a_draft_model_with_another_vocabulary_is_refused(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.gguf"

    def read(path: Path) -> ModelFile:
        file = read_model_file(smollm2_gguf)
        object.__setattr__(file, "vocabulary", 100 if path == other else file.vocabulary)
        return file

    monkeypatch.setattr(drafting, "read_model_file", read)
    with pytest.raises(ConfigError, match=r"has 100 tokens and .* with its own vocabulary only"):
        draft_text(Model(name="m", path=smollm2_gguf, draft=other))


def test_a_pool_says_what_drafts(smollm2_gguf: Path, tmp_path: Path) -> None:
    programs = fake_programs(tmp_path)
    model = {"name": "m", "path": str(smollm2_gguf), "context": 1024, "ubatch": 64}
    models = [model | {"draft": "suffix"}, model | {"name": "b", "draft": "absent.gguf"}]
    pool = write_pool(tmp_path, models, [], llama_server=programs["server"], memory="360MiB")
    try:
        assert "drafts: up to 8 tokens a pass, from each sample's own text" in started(pool)
        arguments = server_arguments(pool)
        assert arguments[arguments.index("--spec-type") + 1] == "ngram-simple,ngram-map-k"
        assert "drafts: up to 8 " in pool.command("status").stdout
        refused = pool.command("swap", "b")
        assert refused.returncode == 1 and "no GGUF file at" in refused.stdout
        assert f"{tmp_path}/absent.gguf" in refused.stdout
        assert "drafts: " not in pool.command("status").stdout
    finally:
        pool.command("stop")
