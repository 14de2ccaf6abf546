"""Tokenizers of the served models as a model hub's cache, for clients that reach no hub.

Clients ask `AutoTokenizer` for a model's name. With HF_HOME set to this folder and HF_HUB_OFFLINE
to 1 they find it: HF_HOME/hub/models--ORG--NAME/snapshots/REVISION, and refs/main with the revision
(the cache of huggingface_hub).
"""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from tinkercloud.core.types import ServedModel

FOLDER = "huggingface"
MARK = ".written-by-tinkercloud"  # in our folders: whatever else is there was downloaded by a user
MAX_FILE_BYTES = 64 * 1024 * 1024  # weights are larger, tokenizers are not
_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"})
_PART = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,96}")

# SDKs and the cookbook look for some models' tokenizers under other names, or at a revision.
_LLAMA_3 = "meta-llama/Llama-3"
_LLAMA_3_MIRRORS = (
    "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    "thinkingmachineslabinc/meta-llama-3-tokenizer",  # SDK 0.7
)
_OTHER_NAMES = {"moonshotai/Kimi-K2.5-Text-Only": ("moonshotai/Kimi-K2.5",)}
_REVISIONS: Mapping[str, tuple[str, ...]] = {
    "moonshotai/Kimi-K2-Thinking": (
        "612681931a8c906ddb349f8ad0f582cb552189cd",
        "a51ccc050d73dab088bf7b0e2dd9b30ae85a4e55",
    ),
    "moonshotai/Kimi-K2.5": (
        "4d01dfe0332d63057c186e0b262165819efb6611",
        "2426b45b6af0da48d0dcce71bbce6225e5c73adc",
    ),
    "moonshotai/Kimi-K2.6": ("b5aabbfb20227ed42becbf5541dbffd213942c58",),
    "moonshotai/Kimi-K3": ("f831ab66814297da540d832a5235f8e904f29d06",),
}


def write_hub(home: Path, served: Iterable[ServedModel]) -> list[str]:
    """Bring `home` to what these models need; the hub names that clients can then ask for.

    Files that are right already are not touched: clients may be reading them.
    """
    sources: dict[str, Path] = {}
    for model in served:
        if model.tokenizer_path is not None:
            for name in hub_names(model.name):
                sources.setdefault(name, model.tokenizer_path)
    hub = home / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    folders = {_repository(hub, name) for name in sources}
    for mark in hub.glob(f"models--*/{MARK}"):
        if mark.parent not in folders:
            shutil.rmtree(mark.parent, ignore_errors=True)
    for name, source in sources.items():
        folder = _repository(hub, name)
        if not folder.exists() or (folder / MARK).exists():
            _write_repository(folder, source, _REVISIONS.get(name, ()))
    return sorted(sources)


def hub_names(model_name: str) -> tuple[str, ...]:
    """The names under which clients look for this model's tokenizer; none for a path."""
    parts = model_name.partition(":")[0].split("/")
    if len(parts) > 3 or not all(_PART.fullmatch(part) for part in parts):
        return ()
    name = "/".join(parts[:2])  # ORG/MODEL/VARIANT has the tokenizer of ORG/MODEL
    mirrors = _LLAMA_3_MIRRORS if name.startswith(_LLAMA_3) else ()
    return (name, *mirrors, *_OTHER_NAMES.get(name, ()))


def _repository(hub: Path, name: str) -> Path:
    return hub / ("models--" + name.replace("/", "--"))


def _write_repository(folder: Path, source: Path, revisions: tuple[str, ...]) -> None:
    contents = {path.name: path.read_bytes() for path in _files(source)}
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    main = digest.hexdigest()[:40]
    snapshots = folder / "snapshots"
    _write(folder / MARK, b"")
    for revision in (main, *revisions):
        for name, content in contents.items():
            _write(snapshots / revision / name, content)
        for stale in {path.name for path in (snapshots / revision).iterdir()} - set(contents):
            (snapshots / revision / stale).unlink()
    _write(folder / "refs" / "main", main.encode())
    for stale in {path.name for path in snapshots.iterdir()} - {main, *revisions}:
        shutil.rmtree(snapshots / stale, ignore_errors=True)


def _files(source: Path) -> list[Path]:
    """What a tokenizer may need of a model's folder; not its weights."""
    return sorted(
        path
        for path in source.iterdir()
        if path.suffix in _SUFFIXES
        and not path.name.endswith(".index.json")
        and path.is_file()
        and path.stat().st_size <= MAX_FILE_BYTES
    )


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".writing-{uuid.uuid4().hex}"
    aside.write_bytes(content)
    os.replace(aside, path)  # whole, or not there
