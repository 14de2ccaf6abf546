"""Which requests are answered by speculation; all others the target answers itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import ConfigError
from tinkercloud.openai_api.bodies import SampledBody

_SERVED = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "stop", "stream", "stream_options", "return_token_ids"),
    *("user", "metadata", "store", "chat_template_kwargs"),
)
# field: values that ask for nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class ServerDefaults:
    """What the target takes where a request says nothing: generation_config.json of other servers'
    models; ours takes OpenAI's defaults. end_tokens: those that it names."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    end_tokens: frozenset[int] = frozenset()

    @classmethod
    def of_folder(cls, folder: Path) -> "ServerDefaults":
        """Raises ConfigError."""
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        numbers = {n: written[n] for n in names if isinstance(written.get(n), int | float)}
        ends = written.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        return cls(**numbers, end_tokens=frozenset(end for end in ends if isinstance(end, int)))

    def sampling(self, body: SampledBody, stops: tuple[str, ...]) -> SamplingOptions:
        """top_k 0 means no limit, as with vLLM."""
        return SamplingOptions(
            temperature=self.temperature if body.temperature is None else body.temperature,
            top_p=self.top_p if body.top_p is None else body.top_p,
            top_k=(self.top_k if body.top_k is None else body.top_k) or -1,
            min_p=self.min_p if body.min_p is None else body.min_p,
            seed=body.seed,
            stops=stops,
        )


def why_passed_on(body: SampledBody) -> str | None:
    """The first field that speculation does not serve; None: there is none."""
    for name, value in body.model_dump(exclude_none=True).items():
        is_served = name in _SERVED or value in _NEUTRAL.get(name, ())
        is_list = name == "prompt" and isinstance(value, list)
        if not is_served or (is_list and not all(isinstance(token, int) for token in value)):
            return name
    return None
