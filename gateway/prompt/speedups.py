"""What of `gateway.prompt` exists in C++ as well, where that has been built (`deploy/compile.py`), or None."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from gateway.prompt.messages import Written

block_hashes: Callable[[bytes, int, int, int, int], list[int]] | None = None
read_chat: Callable[[bytes], tuple[dict[str, Any], list[tuple[str, bytes, bool]], Written] | None] | None = None

try:
    _native = import_module("gateway.prompt.native")
except ModuleNotFoundError:  # one that is there and cannot be loaded is an error
    pass
else:
    block_hashes, read_chat = _native.block_hashes, _native.read_chat
