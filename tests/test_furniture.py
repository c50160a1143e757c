"""The files around the code keep their promises: compose, image, requirements, CI, scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from config import load_config

ROOT = Path(__file__).resolve().parent.parent
SEVEN = {"fastapi", "uvicorn[standard]", "psycopg2-binary", "pydantic", "httpx", "tomli", "pytest"}
NOT_OURS = {".git", ".venv", ".local", ".env", ".hypothesis", "uv.lock"}


@cache
def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml("docker-compose.yml")["services"][name]
    return found


def seconds(duration: str) -> float:
    """A compose file's duration, of the form 75s."""
    assert duration.endswith("s"), duration
    return float(duration.removesuffix("s"))


def requirements(name: str) -> list[str]:
    """The packages that the file names itself: no comments, no `-r`."""
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def project_files() -> list[Path]:
    """What is committed or about to be; in a copy without git, everything but what is made."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [
            path for path in ROOT.rglob("*") if not NOT_OURS & set(path.relative_to(ROOT).parts)
        ]
    return [path for path in found if path.is_file() and "cache" not in str(path.parent)]


# --- docker-compose.yml and the image --------------------------------------------------------


def test_compose_up_starts_postgres_and_only_that() -> None:
    services = read_yaml("docker-compose.yml")["services"]
    assert [name for name, given in services.items() if "profiles" not in given] == ["postgres"]


def test_the_profile_app_adds_the_api_the_workers_and_retention() -> None:
    services = read_yaml("docker-compose.yml")["services"]
    in_profile = {name for name, given in services.items() if given.get("profiles") == ["app"]}
    assert in_profile == {"api", "worker", "retention"}


def test_composes_postgres_is_the_one_that_the_programs_look_for_by_default() -> None:
    postgres = service("postgres")
    assert postgres["image"] == "postgres:18"
    assert [str(port).split(":")[-2:] for port in postgres["ports"]] == [["5432", "5432"]]
    assert postgres["environment"] == {
        "POSTGRES_DB": "orchestrator",
        "POSTGRES_USER": "postgres",
        "POSTGRES_PASSWORD": "${DB_PASSWORD:-devpass}",
    }
    default = load_config(ROOT / "config.toml", {}).database_url
    if not (ROOT / ".env").exists():
        assert default == "postgresql://postgres:devpass@localhost:5432/orchestrator"


def test_composes_postgres_keeps_its_data_in_a_named_volume_where_its_image_wants_it() -> None:
    (mount,) = service("postgres")["volumes"]
    name, path = mount.split(":")
    assert path == "/var/lib/postgresql"
    assert name in read_yaml("docker-compose.yml")["volumes"]


def test_no_port_is_published_to_the_whole_network() -> None:
    for name, given in read_yaml("docker-compose.yml")["services"].items():
        for port in given.get("ports", []):
            assert str(port).startswith("127.0.0.1:"), (name, port)


def test_composes_postgres_counts_as_healthy_only_when_it_answers_over_tcp() -> None:
    assert "--host=127.0.0.1" in service("postgres")["healthcheck"]["test"]
    for name in ("api", "worker", "retention"):
        assert service(name)["depends_on"] == {"postgres": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", ["api", "worker", "retention"])
def test_the_containers_reach_compose_s_postgres_and_the_host_s_ollama(name: str) -> None:
    environment = service(name)["environment"]
    assert environment["DATABASE_URL"] == "postgresql://postgres@postgres:5432/orchestrator"
    assert environment["PGPASSWORD"] == service("postgres")["environment"]["POSTGRES_PASSWORD"]
    assert "http://host.docker.internal:11434" in environment["OLLAMA_URL"]
    assert "${OLLAMA_URL" not in environment["OLLAMA_URL"], "run.sh's .env says localhost there"
    assert service(name)["extra_hosts"] == ["host.docker.internal:host-gateway"]


def test_the_worker_can_be_scaled() -> None:
    assert not {"container_name", "ports", "hostname"} & set(service("worker"))


def test_a_stopped_worker_has_time_to_finish_and_to_hand_back() -> None:
    grace = load_config(ROOT / "config.toml", {}).worker.grace_seconds
    assert seconds(service("worker")["stop_grace_period"]) > 2 * grace


def test_the_commands_of_the_containers_name_files_that_exist() -> None:
    for name in ("api", "worker", "retention"):
        words = " ".join(service(name)["command"]).split()
        files = [word for word in words if word.endswith(".py")]
        files += [word.removesuffix(":app") + ".py" for word in words if word.endswith(":app")]
        assert files, name
        for file in files:
            assert (ROOT / file).is_file(), (name, file)


def test_the_service_retention_maintains_and_purges_every_day() -> None:
    command = service("retention")["command"][-1]
    assert "python admin.py maintain && python admin.py purge; then sleep 86400" in command


def test_the_image_runs_as_nobody_special_and_holds_neither_secrets_nor_data() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM")] == ["FROM python:3.13-slim"]
    last_user = [line for line in lines if line.startswith("USER")][-1]
    assert last_user not in ("USER root", "USER 0")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".env", ".git", ".local", ".venv"} <= set(ignored)


# --- requirements ----------------------------------------------------------------------------


def test_requirements_txt_holds_the_seven_packages_and_nothing_else() -> None:
    names = [re.split(r"[<>=~!;\s]", line)[0] for line in requirements("requirements.txt")]
    assert sorted(names) == sorted(SEVEN)


def test_pyproject_names_the_same_packages_as_the_requirements_files() -> None:
    groups = pyproject()["dependency-groups"]
    dev = [entry for entry in groups["dev"] if isinstance(entry, str)]
    assert pyproject()["project"]["dependencies"] == requirements("requirements.txt")
    assert groups["local"] == requirements("requirements-local.txt")
    assert groups["agents"] == requirements("requirements-agents.txt")
    assert dev == requirements("requirements-dev.txt")


def test_the_changelog_knows_the_version() -> None:
    version = pyproject()["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


# --- scripts, CI, hooks ----------------------------------------------------------------------


def test_every_script_can_be_executed_and_stops_at_an_error() -> None:
    scripts = [*ROOT.glob("*.sh"), ROOT / ".ci" / "run"]
    assert {"run.sh", "test.sh"} <= {script.name for script in scripts}
    for script in scripts:
        assert script.stat().st_mode & 0o111 == 0o111, script.name
        text = script.read_text()
        assert text.startswith("#!/usr/bin/env bash\n"), script.name
        assert "set -euo pipefail" in text, script.name


def test_ci_run_calls_test_sh() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith('/../test.sh"')


def test_skips_are_failures_in_test_sh_and_in_the_workflow() -> None:
    assert "SKIPS_ARE_FAILURES=1 " in (ROOT / "test.sh").read_text()
    test = read_yaml(".github/workflows/ci.yml")["jobs"]["test"]
    assert test["env"]["SKIPS_ARE_FAILURES"] == "1"
    assert "TEST_DATABASE_URL" in test["env"]


def test_the_workflow_may_only_read_and_uses_actions_that_cannot_change() -> None:
    workflow = read_yaml(".github/workflows/ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    used = [
        step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step
    ]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action


def test_the_workflow_begins_with_the_oldest_python_that_pyproject_allows() -> None:
    pairs = read_yaml(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    oldest = min(tuple(map(int, pair["python"].split("."))) for pair in pairs)
    assert pyproject()["project"]["requires-python"] == ">=" + ".".join(map(str, oldest))
    assert len(pairs) == 2


def test_the_pre_commit_hooks_use_the_tools_that_make_check_uses() -> None:
    hooks = {
        hook["id"]: hook
        for repo in read_yaml(".pre-commit-config.yaml")["repos"]
        for hook in repo["hooks"]
    }
    assert {"codespell", "end-of-file-fixer", "trailing-whitespace"} <= set(hooks)
    for name in ("ruff", "ruff-format", "mypy"):
        assert hooks[name]["entry"].startswith(".venv/bin/"), name


def test_make_help_lists_every_target_that_a_person_would_type() -> None:
    makefile = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z]+):.*## \S", makefile, re.MULTILINE))
    assert {"run", "test", "demo", "check", "format", "clean"} <= explained


# --- nothing of one person's machine ---------------------------------------------------------

# Put together here, so that this file does not contain what it looks for.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("docker", "io"),
        ("ghcr", "io"),
    )
]
PERSONAL_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|Users|root|work)/\w")


def findings(text: str) -> Iterator[str]:
    """The registry hosts and the paths of somebody's machine in a text."""
    yield from (host for host in REGISTRY_HOSTS if host in text)
    yield from PERSONAL_PATH.findall(text)


def test_no_file_names_a_registry_or_a_path_of_somebody_s_machine() -> None:
    texts = {}
    for path in project_files():
        try:
            texts[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
    assert "main.py" in texts
    assert {name: found for name, text in texts.items() if (found := [*findings(text)])} == {}


@pytest.mark.parametrize("root", ["home", "Users", "root", "work"])
def test_the_search_for_such_paths_finds_one(root: str) -> None:
    assert [*findings(f"see {'/'.join(['', root, 'jane', 'code'])}")]
    assert [*findings(f"index-url = https://{REGISTRY_HOSTS[0]}/simple")]
    assert not [*findings("GET /tasks/1/work/2, network/home/page, ./root/x")]
