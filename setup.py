"""Builds ``shmstage._native`` from ``native/``. Everything else is declared in ``pyproject.toml``.

``SHMSTAGE_SANITIZE=address|thread|undefined`` builds the sanitized variant. That one, and what ``pip install
--editable`` builds, fails on a compiler's warning and has debug information. What goes into a wheel does neither: a
compiler newer than a release would refuse it, and most of the wheel, and of its build, would be debug information.
"""

import os
import shutil
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

SANITIZERS = ("address", "thread", "undefined")


class BuildNative(build_ext):
    def build_extensions(self) -> None:
        wanted = os.environ.get("CXX", "").split(" ")[0]
        names = [wanted] if wanted else ["c++", "g++", "clang++"]
        if not any(shutil.which(name) for name in names):
            sys.exit(
                f"shmstage needs a C++17 compiler and found no {' or '.join(names)} on PATH; "
                "install one (Debian, Ubuntu: apt-get install g++) or point CXX at it"
            )
        for extension in self.extensions:
            if self.inplace or self.editable_mode or os.environ.get("SHMSTAGE_SANITIZE"):
                extension.extra_compile_args.append("-Werror")
            else:
                extension.extra_compile_args.append("-g0")
        super().build_extensions()


def flags() -> tuple[list[str], list[str]]:
    compile_flags = ["-Wall", "-Wextra", "-Wconversion", "-O3", "-g", "-fvisibility=hidden", "-pthread"]
    link_flags = ["-pthread"]
    sanitize = os.environ.get("SHMSTAGE_SANITIZE")
    if sanitize:
        if sanitize not in SANITIZERS:
            sys.exit(f"SHMSTAGE_SANITIZE={sanitize}: expected one of {', '.join(SANITIZERS)}")
        # the sanitized build inlines pybind11 differently, which sets off a false alarm inside it
        compile_flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1", "-Wno-maybe-uninitialized"]
        link_flags += [f"-fsanitize={sanitize}"]
    return compile_flags, link_flags


compile_flags, link_flags = flags()
root = Path(__file__).parent
setup(
    ext_modules=[
        Pybind11Extension(
            "shmstage._native",
            sorted(str(p.relative_to(root)) for p in (root / "native").glob("*.cpp")),
            depends=sorted(str(p.relative_to(root)) for p in (root / "native").glob("*.h")),
            include_dirs=["native"],
            cxx_std=17,
            extra_compile_args=compile_flags,
            extra_link_args=link_flags,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
