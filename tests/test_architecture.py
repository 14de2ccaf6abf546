"""The import rule of docs/architecture.md, by parsing; and what the tables say of their folders."""

import ast
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tinkercloud.architectures import ARCHITECTURES
from tinkercloud.backends import BACKENDS
from tinkercloud.losses import LOSSES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [p for top in ("tinkercloud", "tinker_gmi") for p in sorted((ROOT / top).rglob("*.py"))]
TOP = {"__init__", "__main__", "app", "cli", "commands", "server"}  # they wire everything

# Room -> the rooms it may import, besides itself. A room is a folder or a single module; a folder
# that has rooms inside stands for the files that lie in none of them.
RULES = {
    "errors": "",
    "addresses": "errors",
    "config": "addresses errors",
    "fetch": "config errors",
    "event_stream": "errors",
    "page_files": "errors",
    "http_connections": "",
    "flushing": "",
    "fingerprints": "",
    "logs": "",
    "core.types": "",
    "wire": "core.types",
    "tinker_gmi.bodies": "wire",
    "tinker_gmi.connection": "tinker_gmi.bodies",
    "tinker_gmi.losses": "tinker_gmi.bodies",
    "tinker_gmi": "core.types tinker_gmi.bodies tinker_gmi.connection tinker_gmi.losses wire",
    "losses": "errors",
    "architectures": "errors",
    "storage": "config core.types errors",
    "planning": "core.types errors",
    "core": "config core.types errors logs losses storage tinker_gmi",
    "backends.base": "core.types errors",
    "backends": "backends.base config core.types decoding errors flushing grammar losses",
    "weights": "architectures core.types errors",
    "decoding": "core.types",
    "grammar": "core.types errors",
    "doctor": "cluster.gpus config embedded.forward embedded.model embedded.native "
    "embedded.process fetch weights",
    "chat": "core.types errors weights",
    "openai_api": "chat core.types errors",
    "anthropic_api": "chat core.types errors",
    "captures": "chat errors storage",
    "services.common": "config core core.types errors tinker_gmi wire",
    "services.accounts": "core.types errors services.common storage tinker_gmi",
    "services.checkpoints": "backends.base core.types errors fingerprints flushing "
    "services.accounts services.common storage tinker_gmi",
    "services.recovery": "backends.base core core.types errors flushing losses "
    "services.checkpoints services.common storage tinker_gmi wire",
    "services.models": "backends.base core core.types errors losses services.accounts "
    "services.checkpoints services.common services.recovery storage tinker_gmi wire",
    "services.results": "backends.base core core.types errors services.checkpoints "
    "services.recovery storage tinker_gmi wire",
    "services.chats": "backends.base chat core.types errors services.accounts "
    "services.checkpoints services.common services.models services.results storage tinker_gmi",
    "services.captures": "captures chat config errors services.chats storage tinker_gmi.bodies",
    "services.runs": "backends.base core core.types errors fingerprints services.checkpoints "
    "services.common services.recovery storage tinker_gmi wire",
    "services.observability": "backends.base core errors logs storage",
    "services": "backends.base config core errors services.accounts services.captures "
    "services.chats services.checkpoints services.common services.models services.observability "
    "services.recovery services.results storage",
    "routers": "anthropic_api captures chat errors event_stream logs openai_api page_files "
    "services services.accounts services.captures services.chats services.checkpoints "
    "services.common services.results storage tinker_gmi tinker_gmi.bodies",
    "pool": "addresses errors weights",
    "proxy": "chat core.types errors event_stream openai_api page_files speculative.drafters",
    "pool.distribution": "errors",
    "pool.sampling": "backends.base chat core.types decoding errors pool weights",
    # speculative decoding, without an engine
    "speculative": "",
    "speculative.drafters": "core.types",
    "speculative.head": "architectures decoding speculative.drafters",
    "speculative.draft_length": "",
    "speculative.learning": "errors flushing speculative.drafters speculative.head",
    "speculative.observability": "errors speculative.draft_length",
    "speculative.remote": "addresses core.types errors speculative.drafters",
    "speculative.pipeline": "addresses chat core.types errors speculative.drafters "
    "speculative.remote",
    # the embedded backend
    "embedded.model": "architectures config decoding embedded.native errors flushing weights",
    "embedded.native": "architectures config decoding errors weights",
    "embedded.forward": "architectures decoding embedded.model embedded.native weights",
    "embedded.fairness": "",
    "embedded.sampling": "core.types decoding embedded.fairness embedded.forward embedded.model "
    "errors grammar speculative speculative.draft_length speculative.drafters speculative.learning "
    "speculative.observability",
    "embedded.training": "architectures core.types decoding embedded.fairness embedded.forward "
    "embedded.model embedded.native errors flushing losses weights",
    "embedded.drafting": "config core.types decoding embedded.forward embedded.model "
    "embedded.native errors speculative.draft_length speculative.drafters speculative.head "
    "speculative.remote weights",
    "embedded.draft_training": "core.types embedded.model embedded.training errors "
    "speculative.drafters speculative.head speculative.learning speculative.observability "
    "weights",
    "embedded.process": "addresses architectures config core.types embedded.draft_training "
    "embedded.drafting embedded.fairness embedded.forward embedded.model embedded.native "
    "embedded.sampling embedded.training errors flushing logs speculative.draft_length "
    "speculative.drafters speculative.learning speculative.remote weights",
    "embedded": "backends.base config core.types embedded.process errors",
    # the cluster backend
    "cluster.gpus": "config errors planning",
    "cluster.lora": "planning",
    "cluster.rollout": "cluster.gpus config core.types decoding errors grammar planning",
    "cluster.weights": "cluster.gpus cluster.rollout errors planning weights",
    "cluster.cpu": "cluster.training config errors",
    "cluster.sglang": "cluster.cpu cluster.rollout cluster.weights config core.types decoding",
    "cluster.training": "cluster.gpus cluster.lora cluster.rollout cluster.weights config "
    "core.types decoding errors losses planning weights",
    "cluster.pool": "cluster.gpus cluster.rollout cluster.training core.types errors planning",
    "cluster": "backends.base cluster.cpu cluster.gpus cluster.pool cluster.rollout "
    "cluster.training cluster.weights config core.types errors planning",
}
# Third-party package -> the rooms that may import it, with all that lie inside them (tinker_gmi
# takes torch by name, at need).
THIRD_PARTY = {
    "torch": "architectures cluster commands decoding doctor embedded losses speculative weights",
    **dict.fromkeys(("megatron", "ray", "sglang", "sglang_router"), "cluster doctor"),
    **dict.fromkeys(
        ("gguf", "safetensors", "tokenizers", "transformers"),
        "chat cluster commands embedded weights",
    ),
    "jinja2": "chat",
    "prometheus_client": "commands proxy services",
    "llguidance": "grammar",
    **dict.fromkeys(("sqlite3", "aiosqlite"), "storage"),
    **dict.fromkeys(("fastapi", "starlette"), "app event_stream page_files proxy routers server"),
    "uvicorn": "http_connections server",
    "opentelemetry": "services",
    "rich": "commands",
    "grpc": "speculative.remote",
    "matplotlib": "speculative.observability",
    "yaml": "config pool",
}


def room_of(module: str) -> str:
    """The room of a dotted name of ours: "tinkercloud.core.types.Datum" lies in "core.types"."""
    package, *inner = module.split(".")
    if package != "tinkercloud":
        finer = ".".join([package, *inner[:1]])
        return finer if finer in RULES else package
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
    around = {room, room.split(".")[0]}
    for name in imports(tree):
        top = name.split(".")[0]
        if top in ("tinkercloud", "tinker_gmi") and name != "tinkercloud.__version__":
            assert room_of(name) in allowed, f"{room} may not import {name}"
        assert around & set(THIRD_PARTY.get(top, room).split()), f"{room} may not import {name}"
    if room not in ("config", "commands") and path.name != "settings.py":  # the client's TINKER_*
        environ = [
            n.lineno for n in ast.walk(tree) if getattr(n, "attr", "") in ("environ", "getenv")
        ]
        assert not environ, f"the environment is read outside config: line {environ}"


def test_a_room_imports_all_that_its_row_names():
    imported: dict[str, set[str]] = {}
    for path in SOURCES:
        rooms = imported.setdefault(room_of(dotted(path)), set())
        rooms |= {room_of(name) for name in imports(parsed(path))}
    unused = {room: set(below.split()) - imported[room] for room, below in RULES.items()}
    assert {room: names for room, names in unused.items() if names} == {}


def test_the_import_rule_has_no_cycle():
    list(TopologicalSorter({room: below.split() for room, below in RULES.items()}).static_order())


@pytest.mark.parametrize("room", RULES)
def test_a_row_of_the_import_rule_names_a_file_or_a_folder(room):
    path = ROOT / ("" if room.startswith("tinker_gmi") else "tinkercloud") / room.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").is_file()


def test_the_document_has_the_same_rows():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.split("| room | may import |", 1)[1].split("\n\n", 1)[0]
    rows = {}
    for line in table.splitlines()[2:]:
        room, below = (re.findall(r"`([\w.]+)`", cell) for cell in line.split("|")[1:3])
        rows |= {name: set(below) for name in room}
    assert rows == {room: set(below.split()) for room, below in RULES.items()}


def test_every_folder_of_the_product_has_its_sentence_in_the_document():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES} - {"tinkercloud"}
    assert sorted(name for name in folders if f"| `{name}/` |" not in text) == []


def test_files_that_are_checked_strictly_exist():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    strict = settings["tool"]["basedpyright"]["strict"]
    assert [name for name in strict if not (ROOT / name).exists()] == []


def test_every_table_lists_exactly_the_files_of_its_folder():
    losses = {spec.target for spec in LOSSES.values()}
    assert modules(losses) == files("losses/*.py")
    assert modules(ARCHITECTURES.values()) | named(
        "architectures", "blocks", "config", "families", "layers"
    ) == files("architectures/*.py")
    assert modules(BACKENDS.values()) | named(
        "backends", "base", "fake_model", "fake_recovery", "fake_sampling"
    ) == files("backends/*.py", "*/backend.py")


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
