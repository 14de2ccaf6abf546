"""A small set of tasks, for answers of a target alone and through the proxy. Most texts here repeat
what was said before, as structured text does, so that a sample's own text drafts some of it."""

from typing import Any

RECORDS = """\
[
  {"id": 1, "name": "Ada Lovelace", "born": 1815, "field": "mathematics"},
  {"id": 2, "name": "Alan Turing", "born": 1912, "field": "computing"},
  {"id": 3, "name": "Emmy Noether", "born": 1882, "field": """
CODE = """\
def area_of_square(side):
    \"\"\"The area of a square.\"\"\"
    return side * side


def area_of_rectangle(width, height):
    \"\"\"The area of a rectangle.\"\"\"
    return width * height


def area_of_"""
SUMS = "12 + 30 = 42\n12 + 31 = 43\n12 + 32 = 44\n12 + 33 = 45\n12 + 34 ="
CHATS = {
    "chat, arithmetic": "What is 17 + 25? Show each step.",
    "chat, a list": "Write the numbers from 1 to 20, one on each line.",
    "chat, JSON": 'Repeat this JSON twice: {"name": "Ada", "born": 1815, "field": "mathematics"}',
    "chat, prose": "Tell me in two sentences why the sky is blue.",
}
COMPLETIONS = {"JSON": RECORDS, "code": CODE, "arithmetic": SUMS}

Request = tuple[str, dict[str, Any]]
"""A path below a base URL, and a body without a model and options of sampling."""

TASKS: dict[str, Request] = {
    **{name: ("completions", {"prompt": prompt}) for name, prompt in COMPLETIONS.items()},
    **{
        name: ("chat/completions", {"messages": [{"role": "user", "content": question}]})
        for name, question in CHATS.items()
    },
}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]
