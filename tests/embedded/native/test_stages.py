"""A step of a pass that has more stages than its table says ends the process instead of writing
past the counters of tasks."""

import subprocess
from pathlib import Path

import pytest

from tinkercloud.config import c_compiler
from tinkercloud.embedded.native import compiler
from tinkercloud.embedded.native.build import KERNELS

PROGRAM = r"""
#include <stdio.h>

#include "pass.h"

/* argv[1] stages where the table allows two. */
int main(int argc, char **argv) {
  (void)argc;
  atomic_long next_task[2] = {0};
  pass_t pass = {.next_task = next_task};
  team_t team = {.size = 1};
  walk_t walk = {.p = &pass, .team = &team, .end = 2};
  for (int stage = 0; stage < atoi(argv[1]); stage++) {
    take(&walk);
    end_stage(&walk);
  }
  printf("%ld %ld\n", atomic_load(&next_task[0]), atomic_load(&next_task[1]));
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes a number of stages as its argument."""
    command = c_compiler()
    if command is None:
        pytest.skip("there is no C compiler here")
    folder = tmp_path_factory.mktemp("stages")
    (folder / "stages.c").write_text(PROGRAM)
    include = f"-I{KERNELS}"
    subprocess.run(
        [
            command,
            *compiler.flags_in_use(),
            include,
            str(folder / "stages.c"),
            "-o",
            str(folder / "stages"),
            "-lm",
        ],
        check=True,
        capture_output=True,
    )
    return folder / "stages"


def test_a_step_may_have_as_many_stages_as_its_table_says(program: Path) -> None:
    done = subprocess.run([program, "2"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 1\n")


def test_a_step_with_a_stage_more_ends_the_process(program: Path) -> None:
    done = subprocess.run([program, "3"], capture_output=True, text=True)
    assert done.returncode < 0
    assert "a step has more stages than its table says" in done.stderr
