"""Names of the results in benchmarks/results/: BENCHMARK[-VARIANT][.INSTRUCTION_SET].json.

A benchmark whose figures depend on the instruction set of the compiled kernels has a result for
each: a run on another kind of machine leaves those of the others alone.
"""

from dataclasses import dataclass
from pathlib import Path

from tinkercloud.embedded.native.instruction_sets import X86_64

SETS = (*(each.name for each in X86_64), "none")
"""From the fastest on; "none": without compiled kernels."""


@dataclass(frozen=True)
class ResultName:
    """variant, instruction_set: "" where a benchmark has none."""

    benchmark: str
    variant: str = ""
    instruction_set: str = ""

    @classmethod
    def of(cls, stem: str) -> "ResultName":
        """stem: of the file."""
        shared, instruction_set = _apart(stem)
        benchmark, _, variant = shared.partition("-")
        return cls(benchmark, variant, instruction_set)

    def __str__(self) -> str:
        return ".".join(filter(None, (self.shared, self.instruction_set)))

    @property
    def shared(self) -> str:
        """The same for all instruction sets."""
        return f"{self.benchmark}-{self.variant}" if self.variant else self.benchmark

    @property
    def order(self) -> tuple[str, str, int]:
        """On a page: the fastest instruction set first."""
        rank = SETS.index(self.instruction_set) if self.instruction_set else -1
        return self.benchmark, self.variant, rank


def path_for(path: Path, instruction_set: str) -> Path:
    """Where the result of an instruction set goes that is to be written to `path`, whether that
    names one or not."""
    return path.with_name(f"{_apart(path.stem)[0]}.{instruction_set}{path.suffix}")


def _apart(stem: str) -> tuple[str, str]:
    """What all instruction sets share, and the name of one or ""."""
    shared, _, last = stem.rpartition(".")
    return (shared, last) if last in SETS else (stem, "")  # a variant may have a dot
