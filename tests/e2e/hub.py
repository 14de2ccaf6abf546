"""A working directory shaped like the model hub, so that stock recipes find all they ask it for.

transformers and datasets take a relative directory before they think of the network. With a
process started in `build_hub(...)`, the hub names below are directories: tokenizers, and small
data sets written here, each with the columns and splits of the one that it stands for.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name for which the cookbook knows a renderer (ChatML) that SmolLM2's tokenizer can follow."""

CONVERSATIONS = "conversations.jsonl"
LANGUAGES = "languages.jsonl"
RUBRICS = "rubrics.jsonl"

Row = Mapping[str, Any]

_DAY = "On day {} the ship was known to come {} noon, and {} of the crew slept {} the storm .\n"
_WORDS = (("before", "most", "through"), ("after", "many", "during"), ("until", "several", "under"))

_CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Chile": "Santiago",
    "Canada": "Ottawa",
    "Ireland": "Dublin",
}
_SENTENCES = {
    "English": ("The cat is on the roof.", "We go to the river with them."),
    "German": ("Die Katze ist auf dem Dach.", "Wir gehen nicht an den Fluss."),
    "French": ("Le chat est sur le toit.", "Nous allons avec eux pour le pain."),
    "Spanish": ("El gato no es de la casa.", "Gracias por la carta y el pan."),
}

# Two answered turns inside a question, in the renderer's own marks: without them SmolLM2 does not
# put its answer into a box, and every reward is the same.
_ANSWERED = "".join(
    f"What is {n}? Provide a numerical answer without units, written inside \\boxed{{}}."
    f"<|im_end|>\n<|im_start|>assistant\n\\boxed{{{n}}}<|im_end|>\n<|im_start|>user\n"
    for n in (22, 47)
)


# The same for a grader, which otherwise writes until its limit of 2,048 tokens.
_DIGIT = "Answer with one digit."
_TURN = _DIGIT + "<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>user\n"
_GRADED = "".join(map(_TURN.format, (3, 8, 5, 9, 2, 6))) + _DIGIT


def build_hub(root: Path, tokenizer: Path) -> Path:
    """`root`, filled: MODEL's tokenizer copied from the folder `tokenizer`, and the data sets."""
    shutil.copytree(tokenizer, root / MODEL)
    for name, write in _DATASETS.items():
        write(root / name)
    _write_rows(root / CONVERSATIONS, _chats())
    _write_rows(root / LANGUAGES, _languages())
    _write_rows(root / RUBRICS, _rubrics())
    return root


def _no_robots(folder: Path) -> None:
    chats = list(_chats())
    _write_rows(folder / "train.jsonl", chats)
    _write_rows(folder / "test.jsonl", chats[:2])


def _gsm8k(folder: Path) -> None:
    """Questions that a very small model answers right about half of the time."""
    rows = [
        {"question": f"{_ANSWERED}What is {n}?", "answer": f"It is {n}.\n#### {n}"}
        for n in range(10, 18)
    ]
    _write_rows(folder / "main" / "train.jsonl", rows)
    _write_rows(folder / "main" / "test.jsonl", rows[:2])
    splits = {split: f"main/{split}.jsonl" for split in ("train", "test")}
    _write_card(folder, "main", splits)


def _hh_rlhf(folder: Path) -> None:
    rows = [
        {
            "chosen": _hh_dialogue(country, f"The capital of {country} is {city}."),
            "rejected": _hh_dialogue(country, "I would rather not say anything about that."),
        }
        for country, city in _CAPITALS.items()
    ]
    _write_rows(folder / "train.jsonl", rows)
    _write_rows(folder / "test.jsonl", rows[:2])


def _deepmath(folder: Path) -> None:
    rows = [
        {"question": f"Find the derivative of x^{n} at x = 1.", "final_answer": str(n)}
        for n in range(2, 10)
    ]
    _write_rows(folder / "train.jsonl", rows)


def wikitext_lines() -> list[str]:
    """With the words that a recipe lets a policy count."""
    return [_DAY.format(day, *_WORDS[day % 3]) for day in range(1, 400)]


def _wikitext(folder: Path) -> None:
    config = "wikitext-103-raw-v1"
    rows = [{"text": line} for line in wikitext_lines()]
    _write_rows(folder / config / "train.jsonl", rows)
    _write_card(folder, config, {"train": f"{config}/train.jsonl"})


_DATASETS = {
    "HuggingFaceH4/no_robots": _no_robots,
    "openai/gsm8k": _gsm8k,
    "Anthropic/hh-rlhf": _hh_rlhf,
    "zwhe99/DeepMath-103K": _deepmath,
    "Salesforce/wikitext": _wikitext,
}


def _chats() -> Iterator[Row]:
    for country, city in _CAPITALS.items():
        question = f"What is the capital of {country}?"
        yield chat(question, f"The capital of {country} is {city}.")


def _languages() -> Iterator[Row]:
    """A prompt distilled away: the text alone, then the label that a long prompt would give."""
    for label, sentences in _SENTENCES.items():
        for sentence in sentences:
            yield chat(sentence, label)


def _rubrics() -> Iterator[Row]:
    """Questions with a rubric that a grader answers with a digit."""
    for country in _CAPITALS:
        item = {
            "rubric_str": "Is the answer a city?",
            "extraction_regex": "([0-9])",
            "grader_output_format_instruction": _GRADED,
        }
        question = {"role": "user", "content": f"What is the capital of {country}?"}
        yield {"convo": [question], "rubric_items": [item]}


def chat(question: str, answer: str) -> Row:
    """One exchange, as the data sets of conversations hold it."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"prompt": question, "messages": messages}


def _hh_dialogue(country: str, answer: str) -> str:
    return f"\n\nHuman: What is the capital of {country}?\n\nAssistant: {answer}"


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_card(folder: Path, config: str, splits: Mapping[str, str]) -> None:
    """The README that tells `datasets` which files a named configuration has."""
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, path in splits.items():
        lines += [f"  - split: {split}", f"    path: {path}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
