"""A small model folder with a tokenizer and a chat template, made on the spot."""

import json
from pathlib import Path

from tests.tokenizers_made import byte_level

CHATML = (
    "{# reasoning stands between <think> and </think> #}"
    "{%- if tools %}<|im_start|>system\nTools:"
    "{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{%- endfor %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_model_folder(folder: Path, template: str | None = CHATML, size: int = 320) -> Path:
    """What a server with the backend `fake` needs of a model."""
    folder.mkdir(parents=True)
    tokenizer = byte_level(size, SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(vocabulary))
    return folder
