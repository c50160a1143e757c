"""The .env beside config.toml, and the lines in it that are run.sh's own.

Such a line has a comment above it that says so. Everything else in the file is the user's
and stays as it is, to the byte.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MARK = "# written by run.sh"


class EnvFile:
    """One .env file, which may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def values(self) -> dict[str, str]:
        """What the file says, read as config.py reads it."""
        from dotenv import dotenv_values  # not at import time: run.sh may not be done installing

        found = dotenv_values(self.path, interpolate=False) if self.path.is_file() else {}
        return {key: value for key, value in found.items() if value is not None}

    def take(self, key: str) -> str | None:
        """Remove run.sh's line for this key, if there is one, and return what it said."""
        before = self._lines()
        after, value = _split(before, key)
        if after != before:
            self._replace(after)
        return value

    def write(self, key: str, value: str, why: str) -> None:
        """Add run.sh's line for this key."""
        lines = self._lines()
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        self._replace([*lines, f"{MARK}: {why}\n", f"{key}={value}\n"])

    def _lines(self) -> list[str]:
        try:
            return self.path.read_bytes().decode().splitlines(keepends=True)
        except FileNotFoundError:
            return []

    def _replace(self, lines: list[str]) -> None:
        """Write the file at once: a reader sees the old text or the new one."""
        if not lines:
            self.path.unlink(missing_ok=True)
            return
        # Its address holds a password: a new file is for its owner only.
        mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o600
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".env.")
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.writelines(lines)
            os.fchmod(file.fileno(), mode)
        os.replace(name, self.path)


def _split(lines: list[str], key: str) -> tuple[list[str], str | None]:
    """The lines without run.sh's pair for this key, and the value that pair gave."""
    kept: list[str] = []
    own: str | None = None
    for line in lines:
        if kept and kept[-1].startswith(MARK) and line.startswith(f"{key}="):
            kept.pop()
            own = line.removeprefix(f"{key}=").strip()
        else:
            kept.append(line)
    return kept, own
