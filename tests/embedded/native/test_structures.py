"""Structures that C and Python share are the same on both sides, or the library is refused."""

import ctypes as c
from collections.abc import Sequence
from typing import Any

import pytest

from tinkercloud.embedded.native import structures
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.structures import MIRRORS, StructureMismatch, check_structures

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

Fields = Sequence[tuple[str, Any]]


def refused(monkeypatch: pytest.MonkeyPatch, name: str, fields: Fields) -> str:
    """The reason why a mirror with these fields is refused."""
    mirror = type("Wrong", (c.Structure,), {"_fields_": tuple(fields)})
    monkeypatch.setitem(MIRRORS, name, mirror)
    with pytest.raises(StructureMismatch) as error:
        check_structures(library())
    return str(error.value)


def test_a_mirror_with_two_fields_exchanged_is_refused_by_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias, *rest = structures.Linear._fields_
    reason = refused(monkeypatch, "linear", [bias, weight, *rest])
    assert reason == "structure linear, field weight: 8 bytes at 0 in C, 8 bytes at 8 in Python"


def test_a_mirror_with_a_field_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [(n, c.c_double if n == "eps" else t) for n, t in structures.Model._fields_]
    reason = refused(monkeypatch, "model", fields)
    assert reason == "structure model, field eps: 4 bytes at 112 in C, 8 bytes at 112 in Python"


def test_a_mirror_that_lacks_the_last_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = structures.Chains.least_lead.offset
    reason = refused(monkeypatch, "chains", structures.Chains._fields_[:-1])
    assert (
        reason == f"structure chains, field least_lead: 4 bytes at {offset} in C, missing in Python"
    )


def test_a_mirror_with_a_field_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = refused(monkeypatch, "draw", [*structures.Draw._fields_, ("later", c.c_int64)])
    assert reason == "structure draw, field later: missing in C, 8 bytes at 48 in Python"


@pytest.mark.parametrize("name", sorted(MIRRORS))
def test_every_structure_is_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MIRRORS, name)
    with pytest.raises(StructureMismatch, match=f"structure {name}, field .* missing in Python"):
        check_structures(library())
