"""The base models on offer."""

from collections.abc import Sequence

from tinkercloud.core.data_converter import DataConverter
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import BaseModelNotServed


class Catalog:
    """The first model is the default one."""

    def __init__(self, served: Sequence[ServedModel]):
        self._served = {model.name: model for model in served}
        self._converters = {model.name: DataConverter(model) for model in served}

    def __iter__(self):
        return iter(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._served)

    def get(self, name: str) -> ServedModel:
        """Raises BaseModelNotServed."""
        if name not in self._served:
            raise BaseModelNotServed(name, self.names)
        return self._served[name]

    def tokenizer_id(self, name: str) -> str:
        """What a client gives to AutoTokenizer: a folder, or the model's name where there is none.

        Raises BaseModelNotServed.
        """
        served = self.get(name)
        return served.name if served.tokenizer_path is None else str(served.tokenizer_path)

    def converter(self, name: str) -> DataConverter:
        """Raises BaseModelNotServed (a model of an earlier run may name one no longer served)."""
        self.get(name)
        return self._converters[name]
