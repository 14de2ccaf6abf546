"""Settings from flags, environment and file, in this order; the tree is checked as it is built."""

import dataclasses
import difflib
import logging
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tinkercloud.config.setting import ENV_PREFIX, Setting, settings
from tinkercloud.config.tree import Config, ModelAlias, ModelSource
from tinkercloud.errors import ConfigError

logger = logging.getLogger(__name__)


def load_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], yaml_path: Path | None = None
) -> Config:
    """The tree from its sources. flags: setting name -> value, None where it was not given.

    yaml_path None: `TINKERCLOUD_CONFIG`, else `config.yaml` in the data directory if there is one.
    ConfigError names the source and the setting.
    """
    by_name = settings()
    layers = [_from_flags(flags, by_name), _from_environment(environ, by_name)]
    layers.append(_from_yaml(_yaml_file(yaml_path, environ, layers), by_name))
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values |= layer
    return _build(Config, values, "")


def parse_model(text: str) -> ModelSource:
    """NAME=PATH; the name may hold slashes, the path may start with ~."""
    name, equals, path = text.strip().partition("=")
    if not (equals and name.strip() and path.strip()):
        raise ValueError(f"{text.strip()!r} is not NAME=PATH")
    return ModelSource(name.strip(), Path(path.strip()).expanduser().absolute())


def _build(tree: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(tree)
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(tree):
        name = prefix + item.name
        if dataclasses.is_dataclass(hints[item.name]):
            arguments[item.name] = _build(hints[item.name], values, f"{name}.")
        elif name in values:
            arguments[item.name] = values[name]
    return tree(**arguments)


def _from_flags(flags: Mapping[str, Any], by_name: Mapping[str, Setting]) -> dict[str, Any]:
    return {
        name: _read(by_name[name], value, by_name[name].flag)
        for name, value in flags.items()
        if value is not None
    }


def _from_environment(environ: Mapping[str, str], by_name: Mapping[str, Setting]) -> dict[str, Any]:
    by_variable = {setting.variable: setting for setting in by_name.values()}
    values: dict[str, Any] = {}
    for variable in sorted(v for v in environ if v.startswith(ENV_PREFIX)):
        if variable in by_variable:
            setting = by_variable[variable]
            values[setting.name] = _read(setting, environ[variable], variable)
        elif variable != ENV_PREFIX + "CONFIG":
            logger.warning("%s is not a setting%s", variable, _nearest(variable, by_variable))
    return values


def _yaml_file(
    path: Path | None, environ: Mapping[str, str], layers: list[dict[str, Any]]
) -> Path | None:
    named = path or environ.get(ENV_PREFIX + "CONFIG")
    if named:
        return Path(named).expanduser()
    data_dir = next((v["data_dir"] for v in layers if "data_dir" in v), Config().data_dir)
    usual = data_dir / "config.yaml"
    return usual if usual.is_file() else None


def _from_yaml(path: Path | None, by_name: Mapping[str, Setting]) -> dict[str, Any]:
    if path is None:
        return {}
    # Here, so that what needs no file needs no YAML package.
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected settings as a mapping, found {type(tree).__name__}")
    values: dict[str, Any] = {}
    for name, value in _flatten(tree or {}, by_name):
        if name not in by_name:
            raise ConfigError(f"{path}: unknown setting {name!r}{_nearest(name, by_name)}")
        values[name] = _read(by_name[name], value, f"{path}: {name}")
    return values


def _flatten(
    tree: Mapping[Any, Any], by_name: Mapping[str, Setting], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_branch = any(other.startswith(f"{name}.") for other in by_name)
        if is_branch and (isinstance(value, dict) or value is None):
            yield from _flatten(value or {}, by_name, f"{name}.")
        else:
            yield name, value


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read(setting: Setting, value: Any, source: str) -> Any:
    try:
        return _convert(setting.kind, value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _convert(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return _choice(typing.get_args(kind), value)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        # Optional only; `auto` is how a flag or a variable says None.
        inner = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        return None if value in (None, "auto") else _convert(inner, value)
    return _CONVERTERS[kind](value)


def _choice(allowed: tuple[Any, ...], value: Any) -> Any:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


_SIZE = re.compile(r"(?i)\s*(\d+)\s*([kmgt]i?b?|b)?\s*")


def parse_integer(value: Any) -> int:
    """A whole number; `2GiB` and `512M` count in powers of 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a whole number")
    unit = (match[2] or "b")[0].lower()
    return int(match[1]) * 1024 ** "bkmgt".index(unit)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None


_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_TRUTH |= {"0": False, "false": False, "no": False, "off": False}


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in _TRUTH:
        raise ValueError(f"{value!r} is not true or false")
    return _TRUTH[str(value).lower()]


def _text(value: Any) -> str:
    if value is False:
        return "off"  # as YAML reads the bare word
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a text")
    return value


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_text(value)).expanduser().absolute()


def parse_alias(text: str) -> ModelAlias:
    """NAME=SERVED."""
    name, equals, served = (part.strip() for part in text.strip().partition("="))
    if not (equals and name and served):
        raise ValueError(f"{text.strip()!r} is not NAME=SERVED")
    return ModelAlias(name, served)


def _pairs(value: Any) -> list[str]:
    """A mapping (file), a list (flags, file) or separated text (environment) of NAME=VALUE."""
    if isinstance(value, dict):
        return [f"{name}={other}" for name, other in value.items()]
    if isinstance(value, str):
        return [part for part in re.split(r"[,\n]", value) if part.strip()]
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a mapping of names")
    return [_text(part) for part in value]


def _models(value: Any) -> tuple[ModelSource, ...]:
    models = tuple(parse_model(part) for part in _pairs(value))
    _check_unique([model.name for model in models])
    return models


def _aliases(value: Any) -> tuple[ModelAlias, ...]:
    aliases = tuple(parse_alias(part) for part in _pairs(value))
    _check_unique([alias.name for alias in aliases])
    return aliases


def _check_unique(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    bool: _truth,
    float: _number,
    int: parse_integer,
    str: _text,
    Path: _path,
    tuple[ModelSource, ...]: _models,
    tuple[ModelAlias, ...]: _aliases,
}
