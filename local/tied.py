"""Run a Python program that ends when its parent dies, even if the parent was killed.

    python -m local.tied PARENT_PID (-m MODULE | FILE) [ARGUMENTS]

A small program of its own, because code between fork and exec is unsafe beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # the setting outlives exec


def main() -> None:
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell wanted


if __name__ == "__main__":
    main()
