"""The compiled kernels: the library for this processor, which the wheel carries or which is made
at its first use."""

import ctypes as c
import logging
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tinkercloud.config import c_compiler, forced_instruction_set, user_cache_dir
from tinkercloud.embedded.native.build import CARRIED, compiled, compiler_flags, file_name, source
from tinkercloud.embedded.native.instruction_sets import (
    AMX,
    AMX_EMULATED,
    InstructionSet,
    architecture_sets,
    processor_features,
    processor_lines,
    processor_sets,
)
from tinkercloud.embedded.native.structures import Batch, Chains, Model, Scan, check_structures
from tinkercloud.errors import ConfigError

__all__ = ["flags_in_use", "instruction_set", "library", "processor", "source", "usable_sets"]

logger = logging.getLogger(__name__)

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
WRONG_TILES = "AMX is not used: on this machine it computes other products than it is specified to"


@cache
def library() -> c.CDLL | None:
    """None where there is neither a carried library nor a C compiler that makes one; what is lost
    is logged once. ConfigError: an instruction set is asked for that this processor lacks."""
    try:
        loaded = _load()
    except OSError as error:
        logger.warning(
            "no compiled kernels (%s): PyTorch computes, at a part of their speed, and the "
            "log-probabilities of samples, prompts and training are equal up to rounding only",
            error,
        )
        return None
    check_structures(loaded)
    loaded.instruction_set.restype = c.c_char_p
    loaded.team_new.restype = c.c_void_p
    loaded.team_new.argtypes = (c.c_int,)
    loaded.team_end.argtypes = (c.c_void_p,)
    loaded.forward.argtypes = (c.c_void_p, c.POINTER(Model), c.POINTER(Batch))
    loaded.draft_chains.argtypes = (c.c_void_p, c.POINTER(Model), c.POINTER(Chains))
    loaded.scan.argtypes = (c.c_void_p, c.POINTER(Scan))
    loaded.log_sum_exp.argtypes = (c.c_void_p, c.c_void_p, c.c_int64, c.c_int64, c.c_void_p)
    logger.info("compiled kernels: instruction set %s", loaded.instruction_set().decode())
    return loaded


def instruction_set() -> str:
    """The one that the kernels in use are compiled for; "none" without compiled kernels."""
    loaded = library()
    return "none" if loaded is None else loaded.instruction_set().decode()


def usable_sets() -> list[InstructionSet]:
    """Those that may be used here, from the fastest on: what the processor has, or the one that the
    settings name."""
    forced = forced_instruction_set()
    if forced == AMX_EMULATED.name:
        return [AMX_EMULATED]
    names = processor_sets(processor_features())
    if AMX in names and not _permit_tiles():
        names.remove(AMX)
    if forced == "auto":
        return names
    chosen = [each for each in names if each.name == forced]
    if not chosen:
        present = ", ".join(each.name for each in names)
        kind = "lacks" if forced in {each.name for each in architecture_sets()} else "knows no"
        raise ConfigError(
            f"engine.instruction_set: this processor {kind} {forced}; it has {present}"
        )
    return chosen


@cache
def _permit_tiles() -> bool:
    """Ask Linux for the tiles of AMX, once for all threads of the process."""
    request = (c.c_long(value) for value in (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
    return c.CDLL(None).syscall(c.c_long(ARCH_PRCTL), *request) == 0


def _load() -> c.CDLL:
    """The library of the fastest set for which there is one, or can be: a compiler may be older
    than the processor. OSError: there is none; of the fastest set."""
    reasons: list[OSError] = []
    for chosen in usable_sets():
        loaded = _loaded(chosen, reasons)
        if loaded is None:
            logger.info("no kernels for %s: %s", chosen.name, reasons[-1])
        elif chosen == AMX and not tiles_are_right(loaded):
            logger.warning(WRONG_TILES)
            reasons.append(OSError(WRONG_TILES))
        else:
            return loaded
    raise reasons[0]


def _loaded(chosen: InstructionSet, reasons: list[OSError]) -> c.CDLL | None:
    for path in _places(chosen, reasons):
        try:
            return c.CDLL(str(path))
        except OSError as error:  # made for another C library
            reasons.append(error)
    return None


def tiles_are_right(loaded: c.CDLL) -> bool:
    """loaded: for AMX. It computes a few products by the instructions and by plain C: whether they
    have the same bits where no sum is rounded, and a row has the same ones beside any others."""
    answer = loaded.check_amx()
    if answer == 1:  # which Intel's manual and its guide to intrinsics describe differently
        logger.info("AMX rounds its sums here in another order than %s", AMX_EMULATED.name)
    return answer > 0


def _places(chosen: InstructionSet, reasons: list[OSError]) -> Iterator[Path]:
    carried = CARRIED / file_name(chosen)
    if carried.exists():
        yield carried
    compiler = c_compiler()
    if compiler is None:
        reasons.append(OSError("there is no C compiler: install gcc or clang, or set CC"))
        return
    try:
        yield compiled(chosen, compiler, user_cache_dir())
    except OSError as error:
        reasons.append(error)


def flags_in_use() -> tuple[str, ...]:
    """Of the compiler, for a C program beside the library: those of the set in use."""
    in_use = instruction_set()
    return compiler_flags(next(each for each in usable_sets() if each.name == in_use))


def processor() -> str:
    """What the time of a pass depends on besides the source."""
    return "\n".join((instruction_set(), *(processor_lines() or [platform.processor()])))
