"""Grammars on real weights: whatever the temperature, what ends by itself is a document."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from tinkercloud.config import Config, ModelSource
from tinkercloud.core.types import FromBase, Grammar, SampleRequest, SamplingParams, TokenChunk
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "ship": {"type": "string", "maxLength": 20},
        "wind": {"enum": ["north", "east", "south", "west"]},
        "seen_at": {"type": "array", "items": {"type": "integer", "maximum": 23}, "maxItems": 3},
    },
    "required": ["ship", "wind", "seen_at"],
    "additionalProperties": False,
}
PROMPT = (
    "<|im_start|>user\nDescribe a ship that you see, as JSON with ship, wind and seen_at."
    "<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
async def backend(smollm2_gguf: Path, tmp_path: Path) -> AsyncIterator[EmbeddedBackend]:
    models = (ModelSource("smollm2", smollm2_gguf),)
    backend = EmbeddedBackend(Config(data_dir=tmp_path, models=models))
    await backend.start()
    yield backend
    await backend.stop()


@pytest.mark.slow
async def test_what_ends_by_itself_is_a_document_of_the_schema_at_any_temperature(
    backend: EmbeddedBackend, smollm2_gguf: Path, tmp_path: Path
) -> None:
    folder = ensure_tokenizer_folder(smollm2_gguf, tmp_path)
    assert folder is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    version = await backend.publish(FromBase("smollm2"))
    prompt = np.array(tokenizer.encode(PROMPT).ids, np.int32)
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    documents = []
    for temperature in (0.0, 0.7, 1.0, 2.0):
        params = SamplingParams(120, seed=1, temperature=temperature)
        request = SampleRequest(prompt, 3, params, grammar=grammar)
        chunks: list[TokenChunk] = []
        output = await backend.sample(version, request, chunks.append)
        for index, sequence in enumerate(output.sequences):
            own = [c.tokens for c in chunks if c.sample_index == index]
            assert np.array_equal(np.concatenate(own), sequence.tokens)
            assert np.isfinite(sequence.logprobs).all()
            if sequence.stop_reason == "stop":
                text = tokenizer.decode(sequence.tokens.tolist(), skip_special_tokens=True)
                jsonschema.validate(json.loads(text), SCHEMA)
                documents.append(text)
    assert len(documents) >= 6
    assert len(set(documents)) >= 3
