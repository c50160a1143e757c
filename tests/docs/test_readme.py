"""README.md and DESIGN.md say what is there: commands run, tables and links agree with the code."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from itertools import takewhile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from config import Settings, load_config
from tests.conftest import fresh_database
from tests.support.fake_ollama import FakeOllama, answer
from tests.support.processes import Processes, eventually
from tests.support.team_model import TeamModel

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(file.name for file in ROOT.glob("*.md"))
USUAL_ADDRESS = "http://localhost:8000"
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fenced_commands(text: str) -> list[str]:
    """The commands of the fenced blocks, each whole and without its comment."""
    joined = "\n".join(FENCE.findall(text)).replace("\\\n", " ")
    commands, begun = [], ""
    for line in joined.splitlines():
        begun += re.sub(r"\s#\s.*", "", line) + "\n"
        if begun.count("'") % 2 == 0:  # what is between quotes may have several lines
            commands.append(begun.strip())
            begun = ""
    return [command for command in commands if command]


def code_spans(text: str) -> list[str]:
    """What stands between backticks outside of the fenced blocks."""
    return re.findall(r"`([^`]+)`", FENCE.sub("", text))


def table(text: str, *head: str) -> list[list[str]]:
    """The rows below that head, as they are written."""
    lines = iter(text.splitlines())
    assert any(cells(line) == list(head) for line in lines), f"no table {head}"
    next(lines)  # | --- | --- |
    rows = [cells(line) for line in takewhile(lambda line: line.startswith("|"), lines)]
    assert rows, f"the table {head} is empty"
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def plain(cell: str) -> str:
    return cell.strip("`")


# --- curl ------------------------------------------------------------------------------------

ALL_CURLS = [command for command in fenced_commands(README) if command.startswith("curl ")]
RUN_CURLS = [command for command in ALL_CURLS if "/runs" in command]
JOB_CURLS = [command for command in ALL_CURLS if '"t1"' in command or "/tasks/t1" in command]
FENCED_CURLS = [command for command in ALL_CURLS if command not in RUN_CURLS + JOB_CURLS]
INLINE_CURLS = [span for span in code_spans(README) if span.startswith("curl ")]


def the_curl(*parts: str) -> str:
    """The one curl command of the README with all these parts."""
    (found,) = [c for c in FENCED_CURLS + INLINE_CURLS if all(part in c for part in parts)]
    return found


def send_as_curl_would(command: str) -> tuple[int, Any]:
    """For machines without curl: the options that the README uses, and an error for others."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-X", default="GET")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    said = parser.parse_args(shlex.split(command)[1:])
    headers = dict(header.split(": ", 1) for header in said.H)
    got = httpx.request(said.X, said.url, headers=headers, content=said.d, timeout=60)
    return got.status_code, got.json()


def send_with_curl(command: str) -> tuple[int, Any]:
    ended = subprocess.run(
        ["bash", "-c", command + r" --silent --show-error --write-out '\n%{http_code}'"],
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode == 0, ended.stderr
    body, _, status = ended.stdout.rpartition("\n")
    return int(status), json.loads(body)


@dataclass
class Shell:
    """Runs the README's curl commands against an API that listens elsewhere."""

    address: str
    first: tuple[int, Any] = (0, None)  # what the first POST was answered

    def run(self, command: str) -> tuple[int, Any]:
        assert USUAL_ADDRESS in command
        here = command.replace(USUAL_ADDRESS, self.address)
        by_hand = shutil.which("curl") is None
        return send_as_curl_would(here) if by_hand else send_with_curl(here)


@pytest.fixture(scope="module")
def shell(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A new database, an API and a worker, and the README's task submitted."""
    with (
        fresh_database(server_url) as url,
        FakeOllama() as fake,
        Processes(url, fake.url, tmp_path_factory.mktemp("readme")) as processes,
    ):
        fake.on("durable queues", answer("They outlive us.", tokens=3, delay=0.2))
        shell = Shell(processes.api().url)
        processes.worker()
        shell.first = shell.run(the_curl("-X POST"))
        yield shell


def test_every_curl_command_of_the_readme_is_answered_with_a_success(shell: Shell) -> None:
    assert len(FENCED_CURLS) == 3
    for command in FENCED_CURLS + INLINE_CURLS:
        status, _ = shell.run(command)
        assert status in (200, 201), command


def test_the_post_is_answered_with_the_very_words_of_the_readme(shell: Shell) -> None:
    (promised,) = re.findall(r"`POST` answers `(\{.*?\})`", README)
    assert shell.first == (201, json.loads(promised))


def test_the_same_post_again_finds_the_same_task(shell: Shell) -> None:
    status, found = shell.run(the_curl("-X POST"))
    assert (status, found["task_id"]) == (200, shell.first[1]["task_id"])
    _, metrics = shell.run(the_curl("/metrics"))
    assert sum(metrics["by_status"].values()) == 1


def test_a_get_with_wait_answers_when_the_task_has_ended(shell: Shell) -> None:
    status, task = shell.run(the_curl("?wait=30"))
    assert (status, task["status"]) == (200, "SUCCEEDED")
    assert task["result"] == {"text": "They outlive us."}
    assert shell.run(the_curl("/tasks/1", "curl http://")) == (200, task)


def test_the_metrics_count_the_task_and_what_it_cost(shell: Shell) -> None:
    shell.run(the_curl("?wait=30"))
    _, metrics = shell.run(the_curl("/metrics"))
    assert metrics["by_status"]["SUCCEEDED"] == 1
    assert metrics["cost_by_route"]["local"] == "0.00003000"


def test_without_curl_the_commands_mean_the_same(shell: Shell) -> None:
    for command in FENCED_CURLS + INLINE_CURLS:
        here = command.replace(USUAL_ADDRESS, shell.address)
        shell.run(the_curl("?wait=30"))
        assert send_as_curl_would(here) == shell.run(command)


def test_every_page_of_the_api_that_the_readme_links_is_there(shell: Shell) -> None:
    pages = re.findall(rf"<{USUAL_ADDRESS}(\S+)>", README)
    assert pages
    for page in pages:
        assert httpx.get(shell.address + page).status_code == 200, page


def test_the_run_of_the_readme_succeeds(server_url: str, tmp_path: Path) -> None:
    (command,) = RUN_CURLS
    with (
        fresh_database(server_url) as url,
        FakeOllama() as fake,
        Processes(url, fake.url, tmp_path) as processes,
    ):
        api = processes.api()
        processes.worker()
        status, run = Shell(api.url).run(command)
        assert status == 201
        step = api.task(run["steps"][-1]["task_id"], wait=30)
        assert (step["status"], step["step"]) == ("SUCCEEDED", "llm_call.summarize")
        assert api.http.get(f"/runs/{run['run_id']}").json()["status"] == "SUCCEEDED"
        assert len(fake.calls_for("SKIP LOCKED")) == 1  # a fact of the data set


def test_the_job_of_the_readme_is_sent_back_by_a_person_and_done_again(
    server_url: str, tmp_path: Path
) -> None:
    submit, look, reject = JOB_CURLS
    with (
        fresh_database(server_url) as url,
        FakeOllama() as fake,
        Processes(url, fake.url, tmp_path) as processes,
    ):
        fake.script = team = TeamModel()
        api = processes.api()
        processes.worker()
        shell = Shell(api.url)
        assert shell.run(submit) == (201, {"task_id": "t1", "status": "PENDING"})
        eventually(lambda: shell.run(look)[1]["status"] == "AWAITING_APPROVAL")
        _, job = shell.run(look)
        assert job["state"]["code"] == job["state"]["approval"]["asks"]["code"]
        assert shell.run(reject) == (200, {"task_id": "t1", "status": "PENDING"})
        eventually(lambda: team.counts["coder"] == 2)
        assert "Up to 30, please." in team.prompts("coder", "fizzbuzz")[1]


# --- configuration ---------------------------------------------------------------------------

SETTINGS_TABLE = table(README, "setting", "default", "meaning")
ENVIRONMENT_TABLE = table(README, "variable", "default", "meaning")
VARIABLES = [plain(row[0]) for row in ENVIRONMENT_TABLE]
# What a variable is set to, and the setting in which that is to be found.
PROOF = {
    "DATABASE_URL": ("postgresql://me@there/mine", "database_url"),
    "DB_PASSWORD": ("s3cret", "database_url"),
    "DATABASE_LISTEN_URL": ("postgresql://me@direct/mine", "database_listen_url"),
    "OLLAMA_URL": ("http://models:1", "ollama.url"),
    "OLLAMA_API_KEY": ("k3y", "ollama_api_key"),
    "POOL_SIZE": ("9", "agents.pool_size"),
}


def setting(settings: Settings, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


def same(written: str, value: Any) -> bool:
    """A default as the README writes it is the one in the code: numbers by value, text exactly."""
    if isinstance(value, bool):
        return written == str(value).lower()  # as TOML has it
    if not isinstance(value, int | float | Decimal):
        return written == str(value)
    try:
        return Decimal(written) == Decimal(str(value))
    except InvalidOperation:
        return False


@pytest.fixture
def defaults(tmp_path: Path) -> Settings:
    """What stands when neither config.toml nor .env nor the environment says anything."""
    (tmp_path / "config.toml").touch()
    return load_config(tmp_path / "config.toml", {})


@pytest.mark.parametrize("row", SETTINGS_TABLE, ids=lambda row: plain(row[0]))
def test_a_setting_in_the_readme_exists_and_has_that_default(
    row: list[str], defaults: Settings
) -> None:
    name, default, _ = map(plain, row)
    assert same(default, setting(defaults, name)), setting(defaults, name)
    shipped: Any = tomllib.loads((ROOT / "config.toml").read_text())
    for part in name.split("."):
        assert part in shipped
        shipped = shipped[part]


def test_the_readme_names_no_setting_twice() -> None:
    names = [row[0] for row in SETTINGS_TABLE + ENVIRONMENT_TABLE]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", [name for name in VARIABLES if name != "ORCHESTRATOR_CONFIG"])
@pytest.mark.parametrize("place", ["environment", ".env"])
def test_a_variable_in_the_readme_is_read(name: str, place: str, tmp_path: Path) -> None:
    value, into = PROOF[name]
    config = tmp_path / "config.toml"
    config.touch()
    if place == ".env":
        (tmp_path / ".env").write_text(f"{name}={value}\n")
    settings = load_config(config, {name: value} if place == "environment" else {})
    found = setting(settings, into)
    assert value in str(found.get_secret_value() if isinstance(found, SecretStr) else found)


def test_another_settings_file_is_read_when_the_environment_names_it(tmp_path: Path) -> None:
    assert "ORCHESTRATOR_CONFIG" in VARIABLES
    (tmp_path / "other.toml").write_text("[retry]\nmax_retry = 7\n")
    other = load_config(environ={"ORCHESTRATOR_CONFIG": str(tmp_path / "other.toml")})
    assert other.retry.max_retry == 7


def test_the_defaults_of_the_variables_are_those_in_the_readme(defaults: Settings) -> None:
    written = {plain(row[0]): row[1] for row in ENVIRONMENT_TABLE}
    where, user = re.findall(r"`([^`]+)`", written["DATABASE_URL"])
    password = plain(written["DB_PASSWORD"])
    assert defaults.database_url == f"postgresql://{user}:{password}@{where}"
    assert written["DATABASE_LISTEN_URL"] == "the same as `DATABASE_URL`"
    assert defaults.database_listen_url == defaults.database_url
    assert setting(defaults, plain(written["OLLAMA_URL"])) == "http://localhost:11434"
    assert written["OLLAMA_API_KEY"] == "none"
    assert defaults.ollama_api_key is None
    assert (ROOT / plain(written["ORCHESTRATOR_CONFIG"])).is_file()


def test_the_comparison_of_defaults_sees_a_stale_one() -> None:
    assert same("0.0001", Decimal("0.00010"))
    assert same("60", 60.0)
    assert same("false", False)
    assert not same("false", True)
    assert not same("0", False)
    assert not same("61", 60.0)
    assert not same("sixty", 60)
    assert not same("qwen3:8b", "qwen3:14b")


# --- files and commands ----------------------------------------------------------------------


def files_named_in(text: str) -> set[str]:
    """Files of this checkout that commands and code spans name; made ones begin with a dot."""
    words = {word for said in fenced_commands(text) + code_spans(text) for word in said.split()}
    scripts = {word for word in words if word.startswith("./")}
    modules = {word.removesuffix(":app") + ".py" for word in words if word.endswith(":app")}
    ours = re.compile(r"[\w-][\w./-]*\.(py|sql|sh|toml|txt|md|yml|png)")
    return scripts | modules | {word for word in words if ours.fullmatch(word)}


def linked_in(text: str) -> set[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return {
        target.partition("#")[0]
        for target in targets
        if not re.match(r"\w+:", target) and target.partition("#")[0]
    }


def test_every_file_that_the_readme_names_is_there() -> None:
    named = files_named_in(README)
    assert {"./run.sh", "./test.sh", "./demo.sh", "requirements.txt", "scheduler.py"} <= named
    assert {"main.py", "admin.py", "config.toml"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_script_that_the_readme_names_can_be_run() -> None:
    for name in files_named_in(README):
        if name.startswith("./"):
            assert os.access(ROOT / name, os.X_OK), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file(document: str) -> None:
    linked = linked_in((ROOT / document).read_text(encoding="utf-8"))
    assert [name for name in sorted(linked) if not (ROOT / name).exists()] == []


def test_the_readme_links_all_documents_and_the_drawing() -> None:
    wanted = {"DESIGN.md", "DEBUGGING_NOTES.md", "ROADMAP.md", "CHANGELOG.md"}
    assert wanted | {"docs/architecture.png"} <= linked_in(README)


def test_a_worker_takes_the_options_that_the_readme_names() -> None:
    (sentence,) = re.findall(r"^A worker takes .*", README, re.MULTILINE)
    options = re.findall(r"`(--\w+)", sentence)
    assert options
    ended = subprocess.run(
        [sys.executable, "scheduler.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert [option for option in options if option not in ended.stdout] == []


# --- the guarantees of DESIGN.md -------------------------------------------------------------


@cache
def functions_tested_in(file: Path) -> frozenset[str]:
    """The test functions that pytest finds in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def is_a_test(named: str) -> bool:
    """`tests/room/test_file.py::test_function`, without parameters."""
    name, _, function = named.partition("::")
    return (ROOT / name).is_file() and function in functions_tested_in(ROOT / name)


@pytest.mark.parametrize(
    "row", table(DESIGN, "guarantee", "mechanism", "test"), ids=lambda row: row[0]
)
def test_the_tests_behind_a_guarantee_are_there(row: list[str]) -> None:
    guarantee, mechanism, tests = row
    named = re.findall(r"`([^`]+)`", tests)
    assert guarantee
    assert mechanism
    assert named, "a guarantee without a test"
    assert [name for name in named if not is_a_test(name)] == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    here = "tests/docs/test_readme.py"
    assert is_a_test(f"{here}::test_a_test_that_is_not_there_is_noticed")
    assert not is_a_test(f"{here}::test_that_nobody_wrote")
    assert not is_a_test("tests/docs/test_nowhere.py::test_a_test_that_is_not_there_is_noticed")


# --- the states of DESIGN.md -----------------------------------------------------------------

STATE_TABLE = table(
    DESIGN, "", "from", "to", "reason", "who, by which statement", "counters"
)  # fmt: skip
Arrow = tuple[str, str, str]  # from (empty: the row is created), to, reason


def arrows_of_table() -> dict[str, Arrow]:
    return {letter: (before, after, reason) for letter, before, after, reason, *_ in STATE_TABLE}


def arrows_of_drawing() -> dict[str, Arrow]:
    """The arrows of the Mermaid drawing that have letters: `A --> B: a reason, b reason`."""
    (drawing,) = re.findall(r"^```mermaid\n(.*?)^```", DESIGN, re.MULTILINE | re.DOTALL)
    arrows = {}
    for before, after, labels in re.findall(r"(\S+) --> (\w+): (.+)", drawing):
        for label in labels.split(","):
            letter, reason = label.split()
            assert letter not in arrows, f"{letter} is drawn twice"
            arrows[letter] = (before.replace("[*]", ""), after, reason)
    return arrows


def arrows_of_schema() -> set[Arrow]:
    """The rows that schema.sql puts into `transitions`."""
    schema = (ROOT / "schema.sql").read_text(encoding="utf-8")
    (rows,) = re.findall(r"INSERT INTO transitions .*? VALUES(.*?);", schema, re.DOTALL)
    found = re.findall(r"\((NULL|'\w+'),\s*'(\w+)',\s*'(\w+)'\)", rows)
    assert len(found) == rows.count("("), "a row that this test cannot read"
    return {(before.replace("NULL", "").strip("'"), after, why) for before, after, why in found}


def test_the_letters_of_the_state_table_are_the_alphabet() -> None:
    letters = [row[0] for row in STATE_TABLE]
    alphabet = [*ascii_lowercase, *(f"a{letter}" for letter in ascii_lowercase)]
    assert letters == alphabet[: len(letters)]


@pytest.mark.parametrize("letter", arrows_of_table())
def test_a_transition_in_the_design_is_one_that_the_database_knows(letter: str) -> None:
    assert arrows_of_table()[letter] in arrows_of_schema()


def test_the_drawing_shows_the_transitions_of_the_table() -> None:
    assert arrows_of_drawing() == arrows_of_table()


def test_the_statements_that_the_state_table_names_are_in_the_code() -> None:
    named = {name for row in STATE_TABLE for name in re.findall(r"`([A-Z_]+)`", row[4])}
    assert named
    code = "\n".join(file.read_text() for file in [ROOT / "db.py", *ROOT.glob("queries/*.py")])
    assert {name for name in named if not re.search(rf"^{name} = ", code, re.MULTILINE)} == set()
