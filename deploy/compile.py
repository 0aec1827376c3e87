"""Compile with mypyc the modules that every request passes through, and the one in Cython (`native.py`).

    python deploy/compile.py                  # build/compiled: a copy of the tree with extensions beside the modules
    python deploy/compile.py --wheel dist     # and a wheel of it

The modules are the same files, and stay what is imported where no wheel fits the interpreter. The extensions go into a
copy and never beside the sources: there, an extension older than its module would hide it.

Needs a C++ compiler, and mypy, Cython, setuptools and the package's dependencies in the interpreter that runs this.
"""

import argparse
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import native

ROOT = Path(__file__).parent.parent
TREE = ROOT / "build" / "compiled"
COPIED = (
    "gateway",
    "policies",
    "loadtests",
    "tests",
    "docs",
    "deploy",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
)

MODULES = (
    "gateway/estimator/{calibration,fallback,hardware,model,predictor,roofline,splitting,transfer}",
    "gateway/prefixes/{feedback,index,shared}",
    "gateway/prompt/{blocks,body,canonical,hand_off,messages,rewrite,token_chain,tokens}",
    "gateway/proxy/{admission,answer,client,errors,exchange,failures,heads,intake,observe,outbox,plane,prefill_leg}",
    "gateway/proxy/{record,remote_prefill,reply,retry_budget,routes,tally,timeouts,upload,upstream,usage_filter}",
    "gateway/replicas/{breaker,ejection,kv_memory,load,replica}",
    "gateway/routing/{assignment,columns,decision,hand_off,pairing,query,refusals,room,router,shortlist,slo,tied}",
    "gateway/sharing/{board,loads,pace,rings}",
    "policies/{draw,predicted_ttft,slo}",
)
"""What mypyc compiles, as shell patterns without the suffix. Not protocols that are looked at at run time
(policies/types.py)."""

SETUP = """\
import sys

from mypyc.build import mypycify
from setuptools import setup

sys.path.insert(0, {deploy!r})
from native import LIBRARIES, extensions

modules = mypycify({paths!r}, opt_level={level!r}, debug_level="0")
setup(ext_modules=[*modules, *extensions(LIBRARIES)])
"""


def module_paths() -> list[str]:
    """The files to compile, relative to the root.

    Raises:
        FileNotFoundError: if one of them does not exist.
    """
    paths = []
    for pattern in MODULES:
        folder, names = pattern.rsplit("/", 1)
        paths += [f"{folder}/{name}.py" for name in names.strip("{}").split(",")]
    if missing := [path for path in paths if not (ROOT / path).is_file()]:
        raise FileNotFoundError(f"{', '.join(missing)}: named in {__file__}, but not there")
    return paths


def copy_tree() -> None:
    """Bring the copy up to date; extensions of an earlier run go."""
    TREE.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = ROOT / name, TREE / name
        if source.is_file():
            shutil.copy2(source, target)
        elif source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for extension in TREE.glob("*.so"):
        extension.unlink()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, metavar="DIRECTORY", help="Write a wheel there, too.")
    parser.add_argument("--level", choices=("0", "1", "2", "3"), default="2", help="Of the C compiler's optimisation.")
    arguments = parser.parse_args()
    paths = module_paths()
    copy_tree()
    native.fetch(TREE / native.LIBRARIES)
    setup = SETUP.format(paths=paths, level=arguments.level, deploy=str(TREE / "deploy"))
    (TREE / "setup.py").write_text(setup, encoding="utf-8")
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=TREE, check=True)
    if arguments.wheel is not None:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", str(arguments.wheel), str(TREE)], check=True)


if __name__ == "__main__":
    main()
