"""For people who installed with pip: build the C++ library for this Python, and tell compilers where it is.

``python -m llm_datadist.native build`` needs cmake, a C++17 compiler and the package pybind11.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = (
    Path(__file__).resolve().parent / "cpp",  # in an installed package
    Path(__file__).resolve().parents[3] / "cpp",  # in a checkout
)


def sources() -> Path:
    """The folder with the sources of the library.

    Raises:
        FileNotFoundError: they are not there.
    """
    for folder in _SOURCES:
        if (folder / "CMakeLists.txt").is_file():
            return folder
    message = f"the C++ sources are in none of {', '.join(map(str, _SOURCES))}"
    raise FileNotFoundError(message)


def build(prefix: Path) -> None:
    """Build and install the library into ``prefix``.

    Raises:
        FileNotFoundError: there is no cmake, or the sources are not there.
        subprocess.CalledProcessError: it could not be built; cmake has said why.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        message = "cmake is not there: install it, for example with pip install cmake"
        raise FileNotFoundError(message)
    with tempfile.TemporaryDirectory() as work:
        settings = [
            f"-DLLM_DATADIST_PYTHON={sys.executable}",
            f"-DCMAKE_INSTALL_PREFIX={prefix}",
            "-DCMAKE_INSTALL_LIBDIR=lib",
        ]
        for step in (["-S", str(sources()), "-B", work, *settings], ["--build", work], ["--install", work]):
            subprocess.run([cmake, *step], check=True)  # noqa: S603 - fixed words and our own paths


def cflags(prefix: Path) -> str:
    """Options for the compiler."""
    return f"-I{prefix / 'include'}"


def libs(prefix: Path) -> str:
    """Options for the linker, with a run path."""
    lib = prefix / "lib"
    return f"-L{lib} -Wl,-rpath,{lib} -lllm_datadist"


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m llm_datadist.native", description="The C++ library.")
    parser.add_argument("command", choices=["build", "config"])
    parser.add_argument("--prefix", type=Path, default=Path(sys.prefix), help="default: this environment")
    parser.add_argument("--cflags", action="store_true", help="config: options for the compiler")
    parser.add_argument("--libs", action="store_true", help="config: options for the linker")
    given = parser.parse_args(arguments)
    prefix: Path = given.prefix.resolve()
    if given.command == "build":
        try:
            build(prefix)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return 0
    if not list((prefix / "lib").glob("libllm_datadist.so*")):
        sys.stderr.write(f"there is no library in {prefix}: run python -m llm_datadist.native build first\n")
        return 1
    both = not given.cflags and not given.libs
    words = [cflags(prefix)] if given.cflags or both else []
    words += [libs(prefix)] if given.libs or both else []
    sys.stdout.write(" ".join(words) + "\n")
    return 0
