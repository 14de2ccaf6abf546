"""One instruction set for a process: the fastest that the processor has, or the one that is named;
and the kernels are right for each."""

import ctypes as c
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.serving import ROOT
from tinkercloud.config import c_compiler, settings
from tinkercloud.embedded.native import build, compiler
from tinkercloud.embedded.native.instruction_sets import (
    AMX_EMULATED,
    GENERIC,
    X86_64,
    architecture_sets,
    processor_features,
    processor_sets,
)
from tinkercloud.errors import ConfigError

VARIABLE = settings()["engine.instruction_set"].variable
KERNEL_TESTS = (
    *("test_packed.py", "test_linear_gradient.py", "test_train_bindings.py"),
    "test_structures.py",
)
NAMES = [chosen.name for chosen in processor_sets(processor_features())]
ALL_NAMES = [*NAMES, AMX_EMULATED.name]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For changes to what the library is chosen by; it is loaded again before and after."""
    compiler.library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    compiler.library.cache_clear()


def in_process(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Of its own, with this instruction set."""
    environment = {**os.environ, VARIABLE: name}
    program = [sys.executable, *command]
    return subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True)


def others() -> Iterator[object]:
    """Sets that the tests of this process do not use already; those are slow that are neither the
    next fastest one with vectors nor the emulation."""
    names = [name for name in NAMES if name != compiler.usable_sets()[0].name]
    vectors = [name for name in names if name != GENERIC.name][:1]
    yield from vectors
    yield from (pytest.param(name, marks=pytest.mark.slow) for name in names if name not in vectors)
    yield AMX_EMULATED.name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(others()))
def test_the_kernels_pass_their_tests_with_every_instruction_set_that_is_here(name: str) -> None:
    files = [str(Path(__file__).with_name(file)) for file in KERNEL_TESTS]
    done = in_process(name, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_library_is_the_one_that_the_setting_names(name: str) -> None:
    code = "from tinkercloud.embedded.native import compiler; print(compiler.instruction_set())"
    assert in_process(name, "-c", code).stdout == f"{name}\n"


@pytest.mark.skipif(len(architecture_sets()) == 1, reason="not x86-64")
def test_each_set_needs_what_the_next_slower_one_needs_and_more() -> None:
    for faster, slower in pairwise(X86_64):
        assert faster.needs > slower.needs
        assert processor_sets(slower.needs)[0] is slower
        assert processor_sets(faster.needs)[:2] == [faster, slower]
    # AVX-512 of the first kind, without the instructions for bytes.
    assert processor_sets({"avx2", "fma", "avx512f"})[0].name == "avx2"


def test_a_set_that_the_processor_lacks_is_refused_by_its_name(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(compiler, "processor_features", frozenset)
    fresh.setenv(VARIABLE, "avx512")
    with pytest.raises(ConfigError, match=r"this processor lacks avx512; it has generic$"):
        compiler.library()


@pytest.mark.skipif(NAMES == ["generic"], reason="there is no other set here")
def test_where_the_compiler_knows_a_set_not_yet_the_next_one_is_used(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newest = compiler.usable_sets()[0].flags[-1]
    old = tmp_path / "cc"
    old.write_text(f'#!/bin/sh\ncase "$*" in *{newest}*) exit 1;; esac\nexec {c_compiler()} "$@"\n')
    old.chmod(0o755)
    fresh.setenv("CC", str(old))
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(compiler, "compiled", compiled_quickly)
    assert compiler.instruction_set() == compiler.usable_sets()[1].name


@pytest.mark.skipif(NAMES == ["generic"], reason="there is no other set here")
def test_where_amx_computes_other_products_one_line_says_so_and_the_next_set_is_used(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first, second = compiler.usable_sets()[:2]
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(compiler, "compiled", compiled_quickly)
    fresh.setattr(compiler, "AMX", first)
    fresh.setattr(compiler, "_permit_tiles", lambda: True)
    fresh.setattr(compiler, "tiles_are_right", lambda loaded: False)
    with caplog.at_level(logging.WARNING):
        assert compiler.instruction_set() == second.name
    assert caplog.messages == [compiler.WRONG_TILES]


def test_amx_is_used_where_it_only_rounds_in_another_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        answers = [compiler.tiles_are_right(Answering(answer)) for answer in range(3)]
    assert answers == [False, True, True]
    assert caplog.messages == ["AMX rounds its sums here in another order than amx_emulated"]


class Answering(c.CDLL):
    """A library for AMX whose check answers so."""

    def __init__(self, answer: int) -> None:
        super().__init__(None)
        self.check_amx = lambda: answer


def test_amx_in_plain_c_is_used_only_where_it_is_named() -> None:
    assert AMX_EMULATED not in architecture_sets()
    assert AMX_EMULATED not in compiler.usable_sets()


def compiled_quickly(chosen: build.InstructionSet, command: str, folder: Path) -> Path:
    """Without optimization."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", ("-O0", "-fPIC", "-pthread"))
        return build.compiled(chosen, command, folder)


def test_a_carried_library_is_used_without_a_compiler(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = c_compiler()
    assert command is not None
    built = build.compiled(GENERIC, command, compiler.user_cache_dir())
    (tmp_path / build.file_name(GENERIC)).write_bytes(built.read_bytes())
    fresh.setattr(compiler, "CARRIED", tmp_path)
    fresh.setenv("CC", "/does/not/exist/cc")
    fresh.setenv(VARIABLE, "generic")
    assert compiler.instruction_set() == "generic"


def test_a_carried_library_of_other_sources_is_not_used(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"kernels-{NAMES[0]}-0123456789abcdef01234567.so").write_bytes(b"")
    fresh.setattr(compiler, "CARRIED", tmp_path)
    assert compiler.instruction_set() == compiler.usable_sets()[0].name


def test_without_any_library_one_line_says_what_is_lost_and_what_to_install(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(compiler, "c_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert compiler.instruction_set() == "none"
    (line,) = caplog.messages
    assert line == (
        "no compiled kernels (there is no C compiler: install gcc or clang, or set CC): PyTorch "
        "computes, at a part of their speed, and the log-probabilities of samples, prompts and "
        "training are equal up to rounding only"
    )


def test_the_set_in_use_is_logged_when_it_is_loaded(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        name = compiler.instruction_set()
    assert f"compiled kernels: instruction set {name}" in caplog.messages
