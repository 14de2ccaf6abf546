"""Where a setting comes from, which source wins, and what a mistake is answered with."""

import dataclasses
import logging
from pathlib import Path

import pytest

from tinkercloud.config import (
    Config,
    ModelAlias,
    ModelSource,
    load_config,
    parse_model,
    settings,
)
from tinkercloud.errors import ConfigError


@pytest.fixture
def write_yaml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write


def refusal(*, flags=None, environ=None, path=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags or {}, environ or {}, path)
    return str(caught.value)


def test_without_any_source_everything_is_the_default():
    assert load_config({}, {}) == Config()


def test_a_flag_beats_the_environment_and_the_environment_beats_the_file(write_yaml):
    path = write_yaml("host: ::1\nport: 1\ndtype: bfloat16\n")
    environ = {"TINKERCLOUD_PORT": "2", "TINKERCLOUD_DTYPE": "float32"}
    config = load_config({"dtype": "auto"}, environ, path)
    assert (config.host, config.port, config.dtype) == ("::1", 2, "auto")


def test_a_flag_that_was_not_given_hides_nothing():
    assert load_config({"port": None}, {"TINKERCLOUD_PORT": "9"}).port == 9


def test_a_zero_is_a_value_like_any_other():
    assert load_config({"port": "0"}, {"TINKERCLOUD_PORT": "9"}).port == 0


@pytest.mark.parametrize("setting", settings().values(), ids=lambda setting: setting.name)
def test_every_setting_can_be_given_by_its_variable(setting):
    text = {
        "host": "localhost",
        "port": "1234",
        "data_dir": "/some/where",
        "models": "a/b=/models/b",
        "pool": "/some/pool.yaml",
        "aliases": "c/d=a/b",
        "dtype": "bfloat16",
        "engine.instruction_set": "avx2",
        "backend": "fake",
        "auth": "no",
        "server_losses": "yes",
        "share_prefix_cache": "yes",
        "log_level": "debug",
        "log_format": "json",
        "speculate": "suffix",
        "speculate_trace": "/some/rounds.jsonl",
        "engine.draft_share": "0.5",
        "draft.tokens": "7",
        "draft.in_quiet_time": "no",
        "draft.make_head": "yes",
        "draft.acceptance": "0.5",
        "draft.replay_share": "0.5",
        "cluster.strategy": "SPREAD",
        "cluster.trainer": "miles",
        "cluster.device": "cpu",
        "cluster.prepare": "module:function",
    }.get(setting.name, "77")
    config = load_config({}, {setting.variable: text})
    branch, _, leaf = setting.name.rpartition(".")
    owner = getattr(config, branch) if branch else config
    assert getattr(owner, leaf) != setting.default


def test_nested_settings_are_nested_in_the_file(write_yaml):
    config = load_config({}, {}, write_yaml("engine:\n  threads: 3\n  max_batch: 8\n"))
    assert (config.engine.threads, config.engine.max_batch) == (3, 8)


def test_auto_takes_back_an_optional_number(write_yaml):
    path = write_yaml("engine: {threads: 3}")
    assert load_config({"engine.threads": "auto"}, {}, path).engine.threads is None


def test_sizes_may_carry_a_unit():
    environ = {"TINKERCLOUD_ENGINE_KV_CACHE_BYTES": "512M", "TINKERCLOUD_MAX_BODY_BYTES": "2 GiB"}
    config = load_config({}, environ)
    assert (config.engine.kv_cache_bytes, config.max_body_bytes) == (512 * 1024**2, 2 * 1024**3)


def test_the_config_file_of_the_data_directory_is_read_unasked(tmp_path):
    (tmp_path / "config.yaml").write_text("port: 4321")
    assert load_config({}, {"TINKERCLOUD_DATA_DIR": str(tmp_path)}).port == 4321


def test_the_config_file_may_be_named_by_the_environment(write_yaml):
    assert load_config({}, {"TINKERCLOUD_CONFIG": str(write_yaml("port: 4322"))}).port == 4322


def test_an_empty_config_file_changes_nothing(write_yaml):
    assert load_config({}, {}, write_yaml("")) == Config()


def test_a_config_file_that_is_named_must_exist(tmp_path):
    assert "missing.yaml" in refusal(path=tmp_path / "missing.yaml")


def test_a_config_file_that_is_no_mapping_is_refused(write_yaml):
    assert "mapping" in refusal(path=write_yaml("- port"))


def test_a_config_file_that_is_no_yaml_is_refused(write_yaml):
    assert "cannot read" in refusal(path=write_yaml("a: [b"))


class TestModels:
    BOTH = (ModelSource("a/b", Path("/m/b")), ModelSource("c/d", Path("/m/d")))

    def test_come_from_repeated_flags(self):
        assert load_config({"models": ["a/b=/m/b", "c/d=/m/d"]}, {}).models == self.BOTH

    @pytest.mark.parametrize("text", ["a/b=/m/b,c/d=/m/d", "a/b=/m/b\nc/d=/m/d\n"])
    def test_come_from_a_variable_with_commas_or_lines(self, text):
        assert load_config({}, {"TINKERCLOUD_MODEL": text}).models == self.BOTH

    def test_come_from_a_mapping_in_the_file(self, write_yaml):
        path = write_yaml("models:\n  a/b: /m/b\n  c/d: /m/d\n")
        assert load_config({}, {}, path).models == self.BOTH

    def test_a_home_directory_is_expanded_and_the_rest_of_equals_signs_kept(self):
        assert parse_model("x=~/a=b").path == Path.home() / "a=b"

    @pytest.mark.parametrize("text", ["name", "=path", "name=", " = "])
    def test_what_is_not_name_and_path_is_refused(self, text):
        assert "NAME=PATH" in refusal(flags={"models": [text]})

    def test_a_name_given_twice_is_refused(self):
        assert "given twice" in refusal(flags={"models": ["a=/x", "a=/y"]})


class TestAliases:
    @pytest.mark.parametrize(
        ("flags", "environ"),
        [
            ({"aliases": ["a/b=x/y", " c/d = z "]}, {}),
            ({}, {"TINKERCLOUD_ALIAS": "a/b=x/y,c/d=z"}),
        ],
    )
    def test_they_are_pairs_of_names(self, flags, environ):
        both = (ModelAlias("a/b", "x/y"), ModelAlias("c/d", "z"))
        assert load_config(flags, environ).aliases == both

    def test_they_are_a_mapping_in_the_file(self, write_yaml):
        path = write_yaml("aliases:\n  a/b: x/y\n")
        assert load_config({}, {}, path).aliases == (ModelAlias("a/b", "x/y"),)

    @pytest.mark.parametrize("text", ["a/b", "=x", "a/b="])
    def test_half_a_pair_is_refused(self, text):
        assert "NAME=SERVED" in refusal(flags={"aliases": [text]})

    def test_a_name_stands_for_one_model(self):
        assert "given twice" in refusal(flags={"aliases": ["a=x", "a=y"]})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TINKERCLOUD_PORT", "http"),
        ("TINKERCLOUD_HOLD_S", "soon"),
        ("TINKERCLOUD_AUTH", "maybe"),
        ("TINKERCLOUD_DTYPE", "float16"),
        ("TINKERCLOUD_ENGINE_THREADS", "1.5"),
        ("TINKERCLOUD_HOST", ""),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_source(variable, value):
    text = refusal(environ={variable: value})
    assert text.startswith(f"{variable}: ")
    assert repr(value) in text


def test_a_bad_value_in_the_file_is_refused_with_file_and_setting(write_yaml):
    path = write_yaml("engine: {max_batch: many}")
    assert refusal(path=path).startswith(f"{path}: engine.max_batch: 'many'")


def test_an_unknown_setting_in_the_file_is_refused_with_the_nearest_name(write_yaml):
    assert "unknown setting 'prot'; did you mean 'port'?" in refusal(path=write_yaml("prot: 1"))


def test_an_unknown_nested_setting_is_refused_with_its_full_name(write_yaml):
    text = refusal(path=write_yaml("engine: {thread: 1}"))
    assert "'engine.thread'; did you mean 'engine.threads'?" in text


def test_a_mapping_where_a_value_belongs_is_refused(write_yaml):
    assert "port" in refusal(path=write_yaml("port: {a: 1}"))


def test_an_unknown_variable_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        load_config({}, {"TINKERCLOUD_PROT": "1"})
    assert "did you mean 'TINKERCLOUD_PORT'" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("hold_s", 0.0),
        ("hold_s", float("nan")),
        ("gap_grace_s", -0.1),
        ("max_body_bytes", 0),
        ("result_ttl_s", -1.0),
        ("engine.threads", 0),
        ("engine.max_batch", 0),
        ("engine.decode_depth", 0.9),
        ("engine.activation_bytes", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        load_config({name: value}, {})


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:99999", "host:1,:2"])
def test_an_address_of_a_drafter_that_is_none_is_refused(address):
    assert "write HOST:PORT" in refusal(flags={"speculate": f"remote:{address}"})


def test_several_drafters_have_several_addresses():
    config = load_config({"speculate": "remote:a:1, [::1]:2"}, {})
    assert config.speculate == "remote:a:1, [::1]:2"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::"])
def test_binding_elsewhere_without_authentication_is_refused(host):
    assert "without authentication" in refusal(flags={"host": host, "auth": False})


def test_loopback_may_go_without_authentication():
    assert load_config({"auth": False}, {}).auth is False


def test_the_tree_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]
