"""Tokenizer and chat template of each base model, read at its first use."""

import asyncio

from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import ServedModel
from tinkercloud.services.common.catalog import Catalog


class TextModels:
    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._models: dict[str, asyncio.Future[TextModel]] = {}

    def served(self, base_model: str) -> ServedModel:
        """Raises BaseModelNotServed."""
        return self._catalog.get(base_model)

    async def get(self, base_model: str) -> TextModel:
        """Raises BaseModelNotServed, or ConfigError for a folder that cannot be read."""
        future = self._models.get(base_model)
        if future is None:
            served = self._catalog.get(base_model)
            future = asyncio.ensure_future(asyncio.to_thread(TextModel.of, served))
            self._models[base_model] = future
        try:
            # shielded: a client that goes away must not cancel what others wait for
            return await asyncio.shield(future)
        except Exception:  # whatever it is: the folder may be mended
            self._models.pop(base_model, None)
            raise
