"""The import rule of docs/architecture.md, by parsing; and what the tables say of their folders."""

import ast
import subprocess
import sys
import time
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tinkercloud.architectures import ARCHITECTURES
from tinkercloud.backends import BACKENDS
from tinkercloud.losses import LOSSES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [p for top in ("tinkercloud", "tinker_gmi") for p in sorted((ROOT / top).rglob("*.py"))]
TOP = {"__init__", "__main__", "app", "cli", "server"}  # they wire everything

# Room -> the rooms it may import, besides itself. A room is a folder or a single module.
RULES = {
    "errors": "",
    "config": "errors",
    "fetch": "config errors",
    "core.types": "",
    "wire": "core.types errors",
    "tinker_gmi": "core.types wire",
    "losses": "errors",
    "architectures": "errors",
    "storage": "config core.types errors",
    "core": "config core.types errors losses storage tinker_gmi wire",
    "backends.base": "core.types errors",
    "backends": "backends.base config core.types errors losses",
    "weights": "architectures core.types errors",
    "decoding": "core.types",
    "speculative": "architectures errors",
    "embedded": "architectures backends.base config core.types decoding errors losses speculative "
    "weights",
    "cluster": "backends.base config core core.types decoding errors losses weights",
    "plan_command": "core errors",
    "services": "backends.base config core core.types errors losses storage tinker_gmi wire",
    "routers": "config core core.types errors services tinker_gmi wire",
    "middleware": "errors routers storage",
}
# Third-party package -> the rooms that may import it (tinker_gmi takes torch by name, at need).
THIRD_PARTY = {
    "torch": "architectures cluster decoding embedded losses speculative weights",
    **dict.fromkeys(("megatron", "ray", "sglang", "sglang_router"), "cluster"),
    **dict.fromkeys(
        ("gguf", "safetensors", "tokenizers", "transformers"), "cluster embedded weights"
    ),
    **dict.fromkeys(("sqlite3", "aiosqlite"), "storage"),
    **dict.fromkeys(("fastapi", "starlette"), "app middleware routers server"),
    "uvicorn": "server",
    "matplotlib": "speculative",
    "yaml": "config",
}


def room_of(module: str) -> str:
    """The room of a dotted name of ours: "tinkercloud.core.types.Datum" lies in "core.types"."""
    package, *inner = module.split(".")
    if package != "tinkercloud":
        return package
    finer = ".".join(inner[:2])
    return finer if finer in RULES else inner[0] if inner else "__init__"


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(tree: ast.AST) -> set[str]:
    """Dotted names, "module.name" for `from module import name`; without TYPE_CHECKING blocks."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            found |= imports(node)
    return found


def parsed(path):
    """CPython up to 3.11.7 counts the depth of trees for all threads together: where another one
    compiles meanwhile, a client of an earlier test say, it raises (cpython issue 106905)."""
    text = path.read_text(encoding="utf-8")
    for _ in range(20):
        try:
            return ast.parse(text)
        except SystemError:
            time.sleep(0.05)
    return ast.parse(text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path):
    room, tree = room_of(dotted(path)), parsed(path)
    assert room in RULES or room in TOP, f"{room} has no row in the import rule"
    allowed = {room, *RULES.get(room, " ".join(RULES)).split()} | (TOP if room in TOP else set())
    for name in imports(tree):
        top = name.split(".")[0]
        if top in ("tinkercloud", "tinker_gmi") and name != "tinkercloud.__version__":
            assert room_of(name) in allowed, f"{room} may not import {name}"
        assert room in THIRD_PARTY.get(top, room).split(), f"{room} may not import {name}"
    if room not in ("config", "cli") and path.name != "settings.py":  # the client's TINKER_*
        environ = [
            n.lineno for n in ast.walk(tree) if getattr(n, "attr", "") in ("environ", "getenv")
        ]
        assert not environ, f"the environment is read outside config: line {environ}"


def test_the_import_rule_has_no_cycle():
    list(TopologicalSorter({room: below.split() for room, below in RULES.items()}).static_order())


def test_every_table_lists_exactly_the_files_of_its_folder():
    losses = {spec.target for spec in LOSSES.values()}
    assert modules(losses) == files("losses/*.py")
    assert modules(ARCHITECTURES.values()) | named("architectures", "config", "layers") == files(
        "architectures/*.py"
    )
    assert modules(BACKENDS.values()) | named("backends", "base", "fake_model") == files(
        "backends/*.py", "*/backend.py"
    )


def modules(targets: Iterable[str]) -> set[str]:
    return {target.split(":")[0] for target in targets}


def named(folder: str, *stems: str) -> set[str]:
    return {f"tinkercloud.{folder}.{stem}" for stem in stems}


def files(*patterns: str) -> set[str]:
    found = [path for pattern in patterns for path in (ROOT / "tinkercloud").glob(pattern)]
    return {dotted(path) for path in found if path.stem != "__init__"}


def test_the_api_process_starts_without_torch():
    modules = ["tinkercloud.app", *(target.split(":")[0] for target in BACKENDS.values())]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
