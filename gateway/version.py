"""The version, in one place."""

from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

VERSION = "0.1.0"


@cache
def compiled() -> bool:
    """Say whether the hot modules are extensions (deploy/compile.py) and not Python."""
    spec = find_spec("gateway.proxy.exchange")
    return spec is not None and spec.origin is not None and spec.origin.endswith(tuple(EXTENSION_SUFFIXES))


def described() -> str:
    """The version, and what is not plain about it."""
    return f"{VERSION} (compiled)" if compiled() else VERSION
