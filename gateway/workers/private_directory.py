"""A directory under the system's temporary one that belongs to this process, and the removal of dead owners' ones.

The owner holds a lock (flock) on a file in it, which the kernel lets go however the process ends. So a directory whose
lock can be taken has nobody any more, whatever process has the owner's number by now. The lock's file gets its name
when it is locked already: what is being made is never taken for left over.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "warmgate-redis-"
_LOCK = "owner.lock"


class PrivateDirectory:
    """A directory that nobody else can enter.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        """Make it, and remove those whose owners have died without doing so."""
        remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        making = self.path / "owner.making"
        self._lock = os.open(making, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        making.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove directories of this user whose owners have ended; return them.

    Args:
        parent: where they are.
    """
    removed = []
    for directory in parent.glob(f"{_PREFIX}*"):
        # Whatever goes wrong, it is no reason not to start: the directory is another user's, or going away just now.
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
                removed.append(directory)
            finally:
                os.close(lock)
    return removed
