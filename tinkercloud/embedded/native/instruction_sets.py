"""The instruction sets that the C files are compiled for, and which of them this processor has.

The standard library only, here and in build.py: setup.py runs both where nothing is installed.
"""

import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """flags: of the compiler. needs: of the processor, as /proc/cpuinfo names them; the kernel
    leaves out what it does not save when it switches threads."""

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    @property
    def multiplies_bfloat16(self) -> bool:
        return "avx512_bf16" in self.needs

    def with_more(self, name: str, *features: str) -> "InstructionSet":
        """This one and these features, named as in /proc/cpuinfo."""
        options = (f"-m{_OPTIONS.get(feature, feature)}" for feature in features)
        return InstructionSet(name, (*self.flags, *options), self.needs | {*features})


_OPTIONS = {  # of gcc and clang, where they differ from the names in /proc/cpuinfo
    "amx_bf16": "amx-bf16",
    "amx_tile": "amx-tile",
    "avx512_bf16": "avx512bf16",
}

GENERIC = InstructionSet("generic")
AVX2 = GENERIC.with_more("avx2", "avx2", "fma")
AVX512 = AVX2.with_more("avx512", "avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512_BF16 = AVX512.with_more("avx512_bf16", "avx512_bf16")
AMX = AVX512_BF16.with_more("amx", "amx_tile", "amx_bf16")
AMX_EMULATED = InstructionSet("amx_emulated", ("-DAMX_EMULATED",))
"""The products of AMX in plain C, for tests: where it is named, and on any machine."""
X86_64 = (AMX, AVX512_BF16, AVX512, AVX2, GENERIC)
"""From the fastest on."""


def architecture_sets() -> tuple[InstructionSet, ...]:
    """Those of this machine's architecture, from the fastest on."""
    return X86_64 if platform.machine() in ("x86_64", "AMD64") else (GENERIC,)


def processor_sets(features: Set[str]) -> list[InstructionSet]:
    """Those of them that a processor with these features has, from the fastest on."""
    return [each for each in architecture_sets() if each.needs <= features]


def processor_features() -> frozenset[str]:
    """As /proc/cpuinfo names them; none where the system does not tell."""
    flags = (line.partition(":")[2] for line in processor_lines() if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def processor_lines() -> list[str]:
    """The processor's name and features, one time each; [] where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags"))})
