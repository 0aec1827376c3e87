"""Build `gateway.prompt.native`, the one module that is written in Cython.

    python deploy/native.py DIRECTORY        # the extension in DIRECTORY/gateway/prompt

It needs a C++ compiler, and Cython and setuptools in the interpreter that runs this. The libraries that it links
statically, simdjson and xxHash (NOTICE has their licences), come from source distributions on the package index that
carry them.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULE = "gateway/prompt/native.pyx"
LIBRARIES = "libraries"
"""Where their sources are put, beside the package."""

SETUP = """\
import sys

from setuptools import setup

sys.path.insert(0, {deploy!r})
from native import LIBRARIES, extensions

setup(ext_modules=extensions(LIBRARIES))
"""

DISTRIBUTIONS = {
    "pysimdjson==7.0.2 --hash=sha256:44cf276e48912a3b9c7ca362c14da8420a7ac15a9f1a16ec95becff86db3904a": (
        "simdjson/simdjson.cpp",
        "simdjson/simdjson.h",
    ),
    "xxhash==4.1.0 --hash=sha256:c9b288e4c1f5dae54417bc8a05e6f6daf505783d916b4783f4dd2f2e7d5db486": (
        "deps/xxhash/xxhash.h",
    ),
}
"""Requirement of a source distribution, and the files that are taken from it."""


def fetch(folder: Path) -> None:
    """Put the libraries' sources into a folder, unless they are there.

    Raises:
        subprocess.CalledProcessError: if the package index does not give them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for requirement, names in DISTRIBUTIONS.items():
        if all((folder / Path(name).name).is_file() for name in names):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            wanted = Path(temporary, "requirements.txt")
            wanted.write_text(requirement, encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            pip += ["--no-build-isolation", "--dest", temporary, "--requirement", str(wanted)]
            subprocess.run(pip, check=True)
            (archive,) = Path(temporary).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                for name in names:
                    member = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{name}")
                    assert member is not None
                    (folder / Path(name).name).write_bytes(member.read())


def extensions(libraries: str) -> list[Any]:
    """What `setup(ext_modules=...)` takes, in a folder that has the package.

    Args:
        libraries: the folder given to `fetch`, relative to that one.
    """
    from Cython.Build import cythonize
    from setuptools import Extension

    native = Extension(
        MODULE.removesuffix(".pyx").replace("/", "."),
        [MODULE, f"{libraries}/simdjson.cpp"],
        include_dirs=[libraries],
        define_macros=[("XXH_INLINE_ALL", None), ("NDEBUG", None)],
        extra_compile_args=["-O3", "-std=c++17", "-g0"],
        # A wheel must not need the C++ library of the machine that made it.
        extra_link_args=["-static-libstdc++", "-static-libgcc"] if sys.platform == "linux" else [],
        language="c++",
    )
    return list(cythonize([native], build_dir=libraries, quiet=True))


def build(target: Path) -> None:
    """Build the extension alone.

    Args:
        target: folder that gets it, as `gateway/prompt/native.*.so`.

    Raises:
        subprocess.CalledProcessError: if it does not compile, or its libraries cannot be had.
    """
    module = target / MODULE
    module.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / MODULE, module)
    fetch(target / LIBRARIES)
    (target / "setup.py").write_text(SETUP.format(deploy=str(ROOT / "deploy")), encoding="utf-8")
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=target, check=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="DIRECTORY", help="Where to build it.")
    build(parser.parse_args().target)


if __name__ == "__main__":
    main()
