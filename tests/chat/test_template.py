"""Prompts equal those of `apply_chat_template` of transformers, for templates of many kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat.model_folder import CHATML, write_model_folder
from tinkercloud.chat.template import ChatTemplate
from tinkercloud.chat.text_model import Conversation, TextModel
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import ConfigError, InvalidRequest

LLAMA = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start|>system\\n' + system }}"
    "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}"
    "{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'nobody' %}{% continue %}{%- endif %}"
    "{%- if 'tool_calls' in message %}{%- for c in message.tool_calls %}"
    '{{- \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
    "{{- c.function.arguments | tojson }}{{- '}' }}{%- endfor %}{%- else %}"
    "{% generation %}{{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim }}"
    "{% endgeneration %}{%- endif %}"
    "{{- eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"
)
BLOCKS = """{% for message in messages %}
  {% set ns = namespace(first=loop.first) %}
  {% if ns.first and mood is defined %}
mood: {{ mood }}
  {% endif %}
{{ message.role | upper }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
ASSISTANT:{% endif %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "blocks": BLOCKS}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a place <b>"today"</b> & tomorrow — naïve',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "Hello there "}]},
    "system": {
        "messages": [
            {"role": "system", "content": " You are brief.\n"},
            {"role": "user", "content": "  Hi 🙂"},
        ]
    },
    "many turns": {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two three"},
            {"role": "user", "content": "<|im_end|>four"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "rain"},
        ],
        "tools": [TOOL],
    },
    "continued": {
        "messages": [
            {"role": "user", "content": "Count"},
            {"role": "assistant", "content": "one two "},
        ],
        "continue_final_message": True,
    },
    "an option": {"messages": [{"role": "user", "content": "x"}], "options": {"mood": "good"}},
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_that_of_transformers(tmp_path: Path, template: str, conversation: str) -> None:
    folder = write_model_folder(tmp_path / "m", TEMPLATES[template])
    fields = CONVERSATIONS[conversation]
    continues = fields.get("continue_final_message", False)
    reference = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<|endoftext|>")
    options = {"tools": fields.get("tools"), **fields.get("options", {})}
    options |= {"add_generation_prompt": not continues, "continue_final_message": continues}
    text = reference.apply_chat_template(fields["messages"], tokenize=False, **options)
    tokens = reference.apply_chat_template(fields["messages"], return_dict=False, **options)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    rendered = ChatTemplate(TEMPLATES[template], special).render(
        fields["messages"],
        fields.get("tools", ()),
        continue_final_message=continues,
        options=fields.get("options"),
    )
    assert rendered == text
    if template == "chatml":
        model = TextModel.of(served(folder))
        asked = Conversation(
            tuple(fields["messages"]),
            tuple(fields.get("tools", ())),
            continues,
            fields.get("options", {}),
        )
        assert model.prompt(asked) == tokens


def served(folder: Path | None) -> ServedModel:
    return ServedModel("m", "llama", 2048, 400, 1, folder, (2,), "float32")


def test_a_template_for_tools_is_taken_where_there_are_tools() -> None:
    template = ChatTemplate("plain", {}, "with {{ tools | length }}")
    assert template.render([{"role": "user", "content": ""}]) == "plain"
    assert template.render([{"role": "user", "content": ""}], [TOOL]) == "with 1"


def test_a_template_of_its_own_file_wins(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", "from the config")
    (folder / "chat_template.jinja").write_text("from the file")
    template = ChatTemplate.of_folder(folder)
    assert template is not None
    assert template.render([{"role": "user", "content": ""}]) == "from the file"


def test_a_list_of_templates_is_read(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", None)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.of_folder(folder)
    assert template is not None
    assert template.render([{"role": "user", "content": ""}], [TOOL]) == "tools"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + none }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}])


def test_a_template_that_does_not_compile_is_a_fault_of_the_folder() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_a_template_without_tools_is_shown_them_in_the_system_message(tmp_path: Path) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    model = TextModel.of(served(write_model_folder(tmp_path / "m", source)))
    messages = (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
    )
    text = model.rendered(Conversation(messages, (TOOL,)))
    assert text.startswith("[system]Be kind.\n\n# Tools")
    assert '"name": "weather"' in text
    assert text.count('{"name": "weather", "arguments": {"place": ') == 2
    assert text.endswith(
        "[user]<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>\n"
    )


def test_tools_in_a_form_that_is_not_known_are_refused(tmp_path: Path) -> None:
    source = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ messages[0].content }}"
    model = TextModel.of(served(write_model_folder(tmp_path / "m", source)))
    hello = ({"role": "user", "content": "hello"},)
    assert model.rendered(Conversation(hello)) == "hello"
    with pytest.raises(InvalidRequest, match="known: hermes, llama3"):
        model.rendered(Conversation(hello, (TOOL,)))


def test_a_template_that_only_mentions_tools_does_not_take_them() -> None:
    assert not ChatTemplate("{# no tools #}Use no tools.{{ messages }}").takes_tools
    assert ChatTemplate("{% if tools is not none %}{% endif %}").takes_tools


def test_a_folder_without_a_template_refuses_chats(tmp_path: Path) -> None:
    model = TextModel.of(served(write_model_folder(tmp_path / "m", None)))
    with pytest.raises(InvalidRequest, match="has no chat template"):
        model.prompt(Conversation(({"role": "user", "content": "x"},)))
