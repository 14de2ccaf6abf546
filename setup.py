"""What pyproject.toml cannot say: the wheel carries the C kernels, compiled for every instruction
set of x86-64, where it is built with a C compiler. Without one it is a wheel for any machine, which
compiles them at their first use; so does an editable installation."""

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tinkercloud.config import c_compiler, user_cache_dir  # noqa: E402
from tinkercloud.embedded.native.build import CARRIED, compiled, file_name  # noqa: E402
from tinkercloud.embedded.native.instruction_sets import architecture_sets  # noqa: E402


def carries_kernels() -> bool:
    return len(architecture_sets()) > 1 and shutil.which(c_compiler() or "") is not None


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Files of a platform, and so a wheel for it."""
        return carries_kernels()


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if carries_kernels() and not self.editable_mode:
            self._add_kernels(Path(self.build_lib) / CARRIED.relative_to(ROOT))

    def _add_kernels(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of other sources
        folder.mkdir(parents=True)
        for chosen in architecture_sets():
            try:
                library = compiled(chosen, c_compiler() or "", user_cache_dir())
            except OSError as error:  # a compiler that is older than the instructions
                self.warn(f"no kernels for {chosen.name}: {error}")
            else:
                shutil.copyfile(library, folder / file_name(chosen))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The kernels are called through ctypes: any Python will do."""
        _, _, platform = super().get_tag()
        return self.python_tag, "none", platform


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel}, distclass=PlatformDistribution)
