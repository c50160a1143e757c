"""Imports go one way: main and scheduler, api and execution, queries, db, connection, config."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Who may import whom, of our own rooms. `local` is a stand-in: the product knows its doors only.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "states": set(),
    "views": {"config", "errors", "states"},
    "addresses": set(),
    "logs": {"errors"},
    "sections": set(),
    "config": {"sections"},
    "connection": {"config", "errors"},
    "pool": {"config", "connection", "errors"},
    "runs": {"errors", "runs"},
    "db": {"config", "connection", "errors", "states"},
    "queries": {"config", "connection", "db", "errors", "states", "runs", "queries"},
    "execution": {
        "addresses",
        "config",
        "connection",
        "errors",
        "logs",
        "pool",
        "queries",
        "runs",
        "execution",
    },
    "api": {
        "addresses",
        "config",
        "connection",
        "db",
        "errors",
        "states",
        "logs",
        "pool",
        "queries",
        "runs",
        "views",
        "api",
    },
    "main": {"config", "db", "errors", "logs", "states", "api"},
    "worker": {
        "config",
        "connection",
        "db",
        "errors",
        "logs",
        "queries",
        "runs",
        "views",
        "worker",
    },
    "scheduler": {"config", "db", "errors", "logs", "queries", "execution", "worker"},
    "admin": {"config", "db", "errors", "logs", "queries"},
    "local": {"config", "local"},
    "bench": {
        "api",
        "config",
        "connection",
        "db",
        "execution",
        "local",
        "main",
        "pool",
        "queries",
        "runs",
        "states",
        "bench",
    },
    "examples": {"execution"},
}


def modules() -> list[Path]:
    files = [*ROOT.glob("*.py")]
    for room in ALLOWED:
        files += (ROOT / room).rglob("*.py")
    return sorted(files)


def rooms_imported_by(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names} & set(ALLOWED)


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_rooms_below_its_own(file: Path) -> None:
    room = file.relative_to(ROOT).parts[0].removesuffix(".py")
    assert room in ALLOWED, (
        f"{room} is no room that this test knows; add it with what it may import"
    )
    assert rooms_imported_by(file) <= ALLOWED[room]
