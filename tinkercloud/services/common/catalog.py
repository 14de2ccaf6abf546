"""The base models on offer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinkercloud.config import MAX_TOPK_LOGPROBS, ModelAlias
from tinkercloud.core.data_converter import DataConverter
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import BaseModelNotServed, ConfigError


class Catalog:
    """The first model is the default one. An alias is listed, and used, as a model of its own; only
    the backend is told its other name.

    Raises ConfigError for an alias of what is not served, or by the name of what is.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        aliases: Sequence[ModelAlias] = (),
        max_topk_logprobs: int = MAX_TOPK_LOGPROBS,
    ):
        self._served = {model.name: model for model in served}
        self._backend_names = {model.name: model.name for model in served}
        for alias in aliases:
            self._add(alias)
        self._converters = {
            name: DataConverter(model, max_topk_logprobs) for name, model in self._served.items()
        }

    def _add(self, alias: ModelAlias) -> None:
        if alias.name in self._backend_names:
            raise ConfigError(f"alias {alias.name!r} is the name of a served model already")
        if self._backend_names.get(alias.served) != alias.served:
            names = ", ".join(
                name for name, served_name in self._backend_names.items() if name == served_name
            )
            raise ConfigError(
                f"alias {alias.name!r} stands for {alias.served!r}, which is not served; served: "
                f"{names or 'none'}"
            )
        self._served[alias.name] = replace(self._served[alias.served], name=alias.name)
        self._backend_names[alias.name] = alias.served

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._served)

    def get(self, name: str) -> ServedModel:
        """Raises BaseModelNotServed."""
        if name not in self._served:
            raise BaseModelNotServed(name, self.names)
        return self._served[name]

    def backend_name(self, name: str) -> str:
        """By which the backend knows a model. Raises BaseModelNotServed."""
        self.get(name)
        return self._backend_names[name]

    def tokenizer_id(self, name: str, *, local: bool) -> str:
        """What a client gives to AutoTokenizer: the folder where it can read that, else the name on
        a hub.

        Raises BaseModelNotServed.
        """
        path = self.get(name).tokenizer_path
        return name.partition(":")[0] if path is None or not local else str(path)

    def converter(self, name: str) -> DataConverter:
        """Raises BaseModelNotServed (a model of an earlier run may name one no longer served)."""
        self.get(name)
        return self._converters[name]
