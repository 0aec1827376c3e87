"""Becomes another program that does not outlive its parent: `child.py PARENT_PID PROGRAM [ARGUMENT ...]`.

A parent that is killed with SIGKILL cannot stop its children. On Linux the kernel does it: it sends SIGTERM
to a process that asked for it when its parent dies (prctl(2), PR_SET_PDEATHSIG), and the wish survives exec.
Elsewhere this only runs the program. Needs nothing but the standard library, so that it starts fast.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then run the program in this process."""
    parent, *program = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != int(parent):
            sys.exit("the parent is gone already")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
