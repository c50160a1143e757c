"""Where run.sh and what it starts say something: the terminal, and files in .local/logs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 15


def say(text: str) -> None:
    """Write a line to the terminal; a terminal that was closed is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def fresh_log(path: Path) -> BinaryIO:
    """Open an empty log; the one before is kept beside it as `.1`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))
    return path.open("wb")


def tail(text: str) -> str:
    """The last lines of a log."""
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
