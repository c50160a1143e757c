"""The style of the code is a test, so that a review can be about ideas."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".venv", ".local", ".git", "node_modules"}

LONGEST_FUNCTION = 70
LONGEST_FILE = 450
# File: its own limit, and why it has one.
LONGER_FILES: dict[str, int] = {}
# Rooms and files whose business it is.
MAY_HOLD_SQL = (
    "connection.py",
    "db.py",
    "queries/",
    "local/",
    "bench/",  # its own databases, and statements as others would write them
    "execution/agent/saver.py",
)
MAY_ASK_THE_CLOCK = ("local/ollama_app.py",)  # Ollama's API says when an answer was created
MAY_PRINT = ("local/output.py",)

STATEMENT = re.compile(
    r"^\s*(SELECT\s|INSERT\s+INTO\s|UPDATE\s+\S+\s+(\w+\s+)?SET\s|DELETE\s+FROM\s|WITH\s+\w+\s+AS\s"
    r"|TRUNCATE\s|CREATE\s+(TABLE|INDEX|DATABASE|SCHEMA|FUNCTION|TYPE)\s"
    r"|(ALTER|DROP)\s+(TABLE|INDEX|DATABASE|SCHEMA|ROLE)\s|LISTEN\s|NOTIFY\s)",
    re.MULTILINE,
)


def python_files() -> list[Path]:
    found = ROOT.rglob("*.py")
    return sorted(file for file in found if not NOT_OURS & set(file.relative_to(ROOT).parts))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


FILES = {name_of(file): file for file in python_files()}
PRODUCT = {name: file for name, file in FILES.items() if not name.startswith("tests/")}


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def docstrings(tree: ast.Module) -> set[ast.AST]:
    bodies = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}


def statements_in(tree: ast.Module) -> list[str]:
    """The string constants that are SQL; what a docstring says is prose."""
    prose = docstrings(tree)
    return [
        f"line {node.lineno}: {node.value.strip()[:40]!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in prose
        and STATEMENT.search(node.value)
    ]


def called(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What is called, as `owner.name` or `name`, and where."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node.lineno
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value
                last = getattr(owner, "id", getattr(owner, "attr", ""))
                yield f"{last}.{node.func.attr}", node.lineno


def calls_of(tree: ast.Module, pattern: str) -> list[str]:
    return [f"line {line}: {name}" for name, line in called(tree) if re.fullmatch(pattern, name)]


Problems = dict[str, list[str]]


def problems(files: dict[str, Path], look: Callable[[ast.Module], list[str]]) -> Problems:
    """What `look` objects to, by file; files without a problem are left out."""
    found = {name: look(tree_of(file)) for name, file in files.items()}
    return {name: said for name, said in found.items() if said}


def without(names: tuple[str, ...]) -> dict[str, Path]:
    """The product's files, except those whose names begin so."""
    return {name: file for name, file in PRODUCT.items() if not name.startswith(names)}


# --- every file ------------------------------------------------------------------------------


def test_no_function_is_longer_than_a_page() -> None:
    def look(tree: ast.Module) -> list[str]:
        lengths = [
            (function.name, (function.end_lineno or 0) - function.lineno + 1)
            for function in functions(tree)
        ]
        return [f"{name}: {lines} lines" for name, lines in lengths if lines > LONGEST_FUNCTION]

    assert problems(FILES, look) == {}


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    lengths = {
        name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in PRODUCT.items()
    }
    too_long = {
        name: lines
        for name, lines in lengths.items()
        if lines > LONGER_FILES.get(name, LONGEST_FILE)
    }
    assert too_long == {}


def test_a_file_that_may_be_longer_needs_to_be() -> None:
    needed = [
        name
        for name in LONGER_FILES
        if len(PRODUCT[name].read_text(encoding="utf-8").splitlines()) > LONGEST_FILE
    ]
    assert needed == list(LONGER_FILES)


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    silent = [name for name, file in PRODUCT.items() if not ast.get_docstring(tree_of(file))]
    assert silent == []


def test_statements_and_cursors_live_where_all_of_them_can_be_read() -> None:
    def look(tree: ast.Module) -> list[str]:
        return statements_in(tree) + calls_of(tree, r".*\.cursor")

    assert problems(without(MAY_HOLD_SQL), look) == {}


def test_only_the_databases_clock_tells_the_time() -> None:
    wall = r"datetime\.(now|utcnow|today)|date\.today|time\.(time|time_ns|localtime|gmtime)"
    assert problems(without(MAY_ASK_THE_CLOCK), lambda tree: calls_of(tree, wall)) == {}


def test_nothing_is_printed_past_the_logs() -> None:
    assert problems(without(MAY_PRINT), lambda tree: calls_of(tree, "print")) == {}


WORK_FOR_LATER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def texts() -> Iterator[Path]:
    kinds = {".py", ".sql", ".sh", ".toml", ".md", ".yml", ".yaml", ".txt", ".js", ".css", ".html"}
    for file in ROOT.rglob("*"):
        folders = file.relative_to(ROOT).parts[:-1]
        hidden = any(folder.startswith(".") and folder != ".github" for folder in folders)
        if file.suffix in kinds and file.is_file() and not hidden:
            yield file


def test_what_is_left_to_do_stands_in_the_roadmap_and_not_in_the_code() -> None:
    found = {
        name_of(file): WORK_FOR_LATER.findall(file.read_text(encoding="utf-8")) for file in texts()
    }
    assert {name for name, words in found.items() if words} == set()


# --- the checks above can fail ---------------------------------------------------------------


def test_the_checks_see_what_they_look_for() -> None:
    tree = ast.parse(
        '"""SELECT is prose here."""\n'
        "import datetime, time\n"
        "def read(conn):\n"
        '    """DELETE FROM is prose here, too."""\n'
        "    print(time.time(), datetime.datetime.now())\n"
        '    conn.cursor().execute("\\n  SELECT 1")\n'
        '    conn.execute(f"UPDATE tasks SET a = {1}")\n'
    )
    assert len(statements_in(tree)) == 2
    assert len(calls_of(tree, r".*\.cursor")) == 1
    assert len(calls_of(tree, r"datetime\.now|time\.time")) == 2
    assert len(calls_of(tree, "print")) == 1
    assert [function.name for function in functions(tree)] == ["read"]
    assert WORK_FOR_LATER.search("# TO" + "DO: later")


# --- tools -----------------------------------------------------------------------------------

TOOLS = {
    "ruff finds nothing to object to": ["ruff", "check", "."],
    "the code is in its format": ["ruff", "format", "--check", "."],
    "the types hold": ["mypy", "."],
}


@pytest.mark.parametrize("command", TOOLS.values(), ids=TOOLS.keys())
def test_tools_are_content(command: list[str]) -> None:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"needs {command[0]}: pip install -r requirements-dev.txt")
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
