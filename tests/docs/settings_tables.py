"""The tables of settings in docs/operations.md: `python -m tests.docs.settings_tables` writes them.

A table stands below a comment that lists its settings; everything else of the page is prose.
"""

import re
from pathlib import Path

from tinkercloud.config import Setting, settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
MARK = re.compile(r"<!-- settings: ([\w. ]+) -->\n(?:\|.*\n)*")
HEAD = "| setting | flag | default | |\n|---|---|---|---|\n"


def names_of(text: str) -> list[str]:
    """The settings of all tables, in their order."""
    return [name for match in MARK.finditer(text) for name in match[1].split()]


def with_tables(text: str) -> str:
    """The page with every table as the settings have it. Raises KeyError for an unknown name."""
    return MARK.sub(lambda match: _table(match[1].split()), text)


def _table(names: list[str]) -> str:
    rows = "".join(_row(settings()[name]) for name in names)
    return f"<!-- settings: {' '.join(names)} -->\n{HEAD}{rows}"


def _row(setting: Setting) -> str:
    flags = ", ".join(f"`{flag}`" for flag in setting.flags)
    if setting.kind is bool:
        flags += f", `--no-{setting.flag.removeprefix('--')}`"
    return f"| `{setting.name}` | {flags} | `{setting.shown_default}` | {setting.help} |\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
