"""config.py: what settings a process accepts, what it refuses, and what it says about it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import psycopg2.extensions
import pytest
import tomli
from pydantic import ValidationError

from config import (
    BUILT_IN_TOOLS,
    ROOT,
    ConfigError,
    McpTool,
    Section,
    Settings,
    load_config,
)
from sections import BUILT_IN_GRAPHS

SHIPPED = ROOT / "config.toml"
Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(toml, dotenv="…", DB_PASSWORD="…"): the settings of such files and environment."""

    def load_from(toml: str = "", dotenv: str | None = None, **environ: str) -> Settings:
        file = tmp_path / "other.toml"
        file.write_text(toml, encoding="utf-8")
        if dotenv is not None:
            (tmp_path / ".env").write_text(dotenv, encoding="utf-8")
        return load_config(environ={"ORCHESTRATOR_CONFIG": str(file), **environ})

    return load_from


REFUSED = {
    "a text where a whole number belongs": (
        '[retry]\nmax_retry = "3"', "retry.max_retry", "integer"),
    "a truth value where a whole number belongs": (
        "[retry]\nmax_retry = true", "retry.max_retry", "integer"),
    "a fraction where a whole number belongs": (
        "[routing]\nprompt_threshold = 1.5", "routing.prompt_threshold", "integer"),
    "a text where seconds belong": (
        '[worker]\nlease_seconds = "30"', "worker.lease_seconds", "without quotes"),
    "a truth value where seconds belong": (
        "[worker]\nreap_seconds = true", "worker.reap_seconds", "number"),
    "endless seconds": (
        "[worker]\nlease_seconds = inf", "worker.lease_seconds", "less than or equal"),
    "more seconds than Postgres can add to the time": (
        "[worker]\nlease_seconds = 1e300", "worker.lease_seconds", "less than or equal"),
    "no seconds": ("[worker]\npoll_seconds = 0", "worker.poll_seconds", "greater than 0"),
    "less than Postgres counts, which would be no limit": (
        "[database]\nlock_timeout_seconds = 0.0004", "database.lock_timeout_seconds", "0.001"),
    "negative seconds": (
        "[ollama]\ntimeout_seconds = -1", "ollama.timeout_seconds", "greater than 0"),
    "more retries than an integer holds": (
        "[retry]\nmax_retry = 3000000000", "retry.max_retry", "less than or equal"),
    "an address with half a bracket": (
        '[ollama]\nurl = "http://[::1"', "ollama.url", "IPv6"),
    "a port that cannot be": ('[ollama]\nurl = "http://h:99999"', "ollama.url", "Port"),
    "a number where a text belongs": ("[models]\nlocal = 3", "models.local", "string"),
    "an empty text": ('[models]\ncloud = ""', "models.cloud", "at least 1 character"),
    "an address that is none": ('[ollama]\nurl = "ftp://x"', "ollama.url", "https?"),
    "a price that is no number": (
        '[cost]\nlocal_per_token = "abc"', "cost.local_per_token", "decimal"),
    "a negative price": (
        '[cost]\ncloud_per_token = "-0.1"', "cost.cloud_per_token", "greater than or equal to 0"),
    "a price that is not a number at all": (
        "[cost]\ncloud_per_token = nan", "cost.cloud_per_token", "finite"),
    "an unknown key": ("[retry]\nretries = 3", "retry.retries", "not a known setting"),
    "an unknown key of a good section": (
        '[database]\ndatabase_url = "x"', "database.database_url", "not a known setting"),
    "an unknown section": ("[retires]\nmax = 3", "retires", "not a known setting"),
    "a value where a section belongs": ("retry = 3", "retry", "3"),
    "a negative limit": (
        "[limits]\nmax_prompt_bytes = -1", "limits.max_prompt_bytes", "greater than or equal to 1"),
    "a negative threshold": (
        "[routing]\npending_threshold = -1", "routing.pending_threshold", "equal to 0"),
    "zero where it is at least one": (
        "[worker]\nconcurrency = 0", "worker.concurrency", "greater than or equal to 1"),
    "zero retries": ("[retry]\nmax_retry = 0", "retry.max_retry", "greater than or equal to 1"),
    "a lease under three heartbeats": (
        "[worker]\nlease_seconds = 29.999", "lease_seconds", "under three heartbeats"),
    "a heartbeat over a third of the lease": (
        "[worker]\nheartbeat_seconds = 11", "lease_seconds", "33 or more"),
    "more steps than a request may hold": (
        "[limits]\nmax_run_steps = 10001", "limits.max_run_steps", "less than or equal to 10000"),
    "more dependencies than can be stored at once": (
        "[limits]\nmax_run_edges = 100001", "limits.max_run_edges", "or equal to 100000"),
    "no steps": ("[limits]\nmax_run_steps = 0", "limits.max_run_steps", "equal to 1"),
    "a tool whose name has a space": ('[tools]\n"a b" = "m:f"', "tools.a b", "pattern"),
    "a tool whose name is too long": (
        f'[tools]\n{"n" * 65} = "m:f"', "tools." + "n" * 65, "pattern"),
    "a tool that is a number": ("[tools]\nmine = 3", "tools.mine", '"module:function"'),
    "a tool that is true": ("[tools]\nmine = true", "tools.mine", '"module:function"'),
    "a tool that is no function": ('[tools]\nmine = "module"', "tools.mine", "pattern"),
    "a tool of two functions": ('[tools]\nmine = "m:f:g"', "tools.mine", "pattern"),
    "a tool taken away that is not there": (
        "[tools]\nfetch_dta = false", "tools", "fetch_dta = false takes nothing away"),
    "a tool of no server": ("[tools]\nmine = {}", "tools.mine.mcp", "required"),
    "a tool of a server that is nowhere": (
        "[tools]\nmine = { mcp = {} }", "tools.mine.mcp", "either command or url"),
    "a tool of a server in two places": (
        '[tools]\nmine = { mcp = { command = ["a"], url = "http://b" } }',
        "tools.mine.mcp", "either command or url"),
    "a server without a program": (
        "[tools.mine.mcp]\ncommand = []", "tools.mine.mcp", "a program and its arguments"),
    "a server whose program has no name": (
        '[tools.mine.mcp]\ncommand = ["", "a"]', "tools.mine.mcp", "a program and its arguments"),
    "a server by a shell line": (
        '[tools.mine.mcp]\ncommand = "a b"', "tools.mine.mcp.command", "tuple"),
    "an address of a server that is none": (
        '[tools.mine.mcp]\nurl = "ws://a"', "tools.mine.mcp.url", "https?"),
    "variables for a server elsewhere": (
        '[tools.mine.mcp]\nurl = "http://a"\nenv = ["A"]', "tools.mine.mcp", "with command"),
    "a token for a command": (
        '[tools.mine.mcp]\ncommand = ["a"]\ntoken_env = "A"', "tools.mine.mcp", "goes with url"),
    "an unknown key of a server": (
        '[tools.mine.mcp]\ncommand = ["a"]\nargs = []', "tools.mine.mcp.args", "not a known"),
    "a function where a section belongs": ('tools = "m:f"', "tools", "dictionary"),
    "leave that is no truth value": (
        '[http_get]\nallow_private_addresses = "no"',
        "http_get.allow_private_addresses", "boolean"),
    "an API that there is not": (
        '[backends.local]\napi = "grpc"', "backends.local.api", "'ollama' or 'openai'"),
    "OpenAI's API of no server": (
        '[backends.cloud]\napi = "openai"', "backends.cloud", "needs url"),
    "an address beside Ollama's": (
        '[backends.local]\nurl = "http://x"', "backends.local", "ollama.url"),
    "a key beside Ollama's": (
        '[backends.cloud]\nkey_env = "A"', "backends.cloud", "OLLAMA_API_KEY"),
    "a limit that Ollama calls otherwise": (
        '[backends.cloud]\nlimit_as = "max_completion_tokens"', "backends.cloud", "limit_as"),
    "a key in the place of its variable": (
        '[backends.cloud]\napi = "openai"\nurl = "http://x"\nkey_env = "sk-1"',
        "backends.cloud.key_env", "pattern"),
    "an address of a backend that is none": (
        '[backends.local]\napi = "openai"\nurl = "localhost:8080"', "backends.local.url", "https?"),
    "a limit by another name": (
        '[backends.local]\napi = "openai"\nurl = "http://x"\nlimit_as = "n"',
        "backends.local.limit_as", "max_completion_tokens"),
    "a route that there is not": ("[backends.edge]", "backends.edge", "not a known setting"),
    "two servers of the cloud": (
        '[ollama]\ncloud_url = "http://x"\n[backends.cloud]\napi = "openai"\nurl = "http://y"',
        "ollama.cloud_url", "leave one out"),
    "days in parts": (
        "[retention]\nfinished_days = 0.5", "retention.finished_days", "integer"),
    "days before now": ("[retention]\naudit_days = -1", "retention.audit_days", "equal to 0"),
    "days that the calendar has not": (
        "[retention]\nfinished_days = 36501", "retention.finished_days", "36500"),
    "keys": ('api_keys = { local = "x" }', "api_keys", "environment"),
    "the database's address": (
        'database_url = "postgresql://x"', "database_url", "environment"),
    "the listener's address": (
        'database_listen_url = "postgresql://x"', "database_listen_url", "environment"),
}  # fmt: skip


@pytest.mark.parametrize(("toml", "key", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_a_setting_that_cannot_be_meant_is_refused_with_file_key_and_reason(
    load: Load, toml: str, key: str, why: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(toml)
    message = str(refused.value)
    assert re.match(r"\S+other\.toml: [\w[]", message), message
    assert re.search(rf"(^|[ :]){re.escape(key)}\b", message), message
    assert why in message


def test_every_wrong_key_is_named_and_not_just_the_first(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"retry\.max_retry.*worker\.concurrency"):
        load("[retry]\nmax_retry = 0\n[worker]\nconcurrency = 0")


@pytest.mark.parametrize("text", ["[retry", "retry: 3", "a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_refused_with_its_name(load: Load, text: str) -> None:
    with pytest.raises(ConfigError, match=r"other\.toml: is not TOML: .*\(at "):
        load(text)


def test_a_file_that_is_not_utf_8_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes(b'[models]\nlocal = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot be read"):
        load_config(file, {})


def test_a_file_that_orchestrator_config_names_has_to_exist(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: .*No such file"):
        load_config(environ={"ORCHESTRATOR_CONFIG": str(missing)})


# --- accepted --------------------------------------------------------------------------------


def test_a_lease_of_exactly_three_heartbeats_is_accepted(load: Load) -> None:
    worker = load("[worker]\nlease_seconds = 3\nheartbeat_seconds = 1").worker
    assert (worker.lease_seconds, worker.heartbeat_seconds) == (3, 1)


@pytest.mark.parametrize("written", ['"0.00001"', "0.00001", "1e-5", '"1e-5"'])
def test_a_price_is_exact_with_and_without_quotes(load: Load, written: str) -> None:
    cost = load(f"[cost]\nlocal_per_token = {written}").cost
    assert cost.local_per_token == Decimal("0.00001")
    assert cost.of_call("local", 0, 3) == Decimal("0.00003")


@pytest.mark.parametrize(
    "written", ['"0.1000000000000000055511151231257827"', "0.1234567890123456789"]
)
def test_a_price_keeps_more_digits_than_a_binary_fraction_has(load: Load, written: str) -> None:
    assert load(f"[cost]\ncloud_per_token = {written}").cost.cloud_per_token == Decimal(
        written.strip('"')
    )


@pytest.mark.parametrize("written", ["1", '"1"', "0", '"0"'])
def test_a_price_may_be_a_whole_number(load: Load, written: str) -> None:
    assert load(f"[cost]\nlocal_per_token = {written}").cost.local_per_token == int(
        written.strip('"')
    )


def test_a_call_costs_its_prompt_and_its_completion_at_the_rates_of_its_route(load: Load) -> None:
    cost = load('[cost]\nlocal_prompt_per_token = "0.5"\ncloud_prompt_per_token = 0.25').cost
    assert cost.of_call("local", 3, 7) == Decimal("1.50007")
    assert cost.of_call("cloud", 3, 7) == Decimal("0.7507")


def test_whole_seconds_and_fractions_of_seconds_are_both_numbers(load: Load) -> None:
    worker = load("[worker]\npoll_seconds = 2\nreap_seconds = 0.25").worker
    assert (worker.poll_seconds, worker.reap_seconds) == (2.0, 0.25)


# --- who goes before whom --------------------------------------------------------------------

ADDRESSES = '[ollama]\nurl = "http://toml:1"'


def test_a_key_that_nobody_sets_has_its_default(load: Load) -> None:
    assert load().ollama.url == "http://localhost:11434"


def test_the_file_goes_before_the_default(load: Load) -> None:
    assert load(ADDRESSES).ollama.url == "http://toml:1"


def test_dotenv_goes_before_the_file(load: Load) -> None:
    assert load(ADDRESSES, "OLLAMA_URL=http://dotenv:2").ollama.url == "http://dotenv:2"


def test_the_environment_goes_before_dotenv(load: Load) -> None:
    settings = load(ADDRESSES, "OLLAMA_URL=http://dotenv:2", OLLAMA_URL="http://env:3")
    assert settings.ollama.url == "http://env:3"


def test_an_address_from_the_environment_leaves_the_rest_of_its_section(load: Load) -> None:
    settings = load("[ollama]\nnum_ctx = 7", OLLAMA_URL="http://env:3")
    assert (settings.ollama.num_ctx, settings.ollama.url) == (7, "http://env:3")


def test_the_databases_address_comes_from_dotenv_and_the_environment_goes_before_it(
    load: Load,
) -> None:
    assert load("", "DATABASE_URL=postgresql://dotenv/a").database_url == "postgresql://dotenv/a"
    settings = load("", "DATABASE_URL=postgresql://dotenv/a", DATABASE_URL="postgresql://env/b")
    assert settings.database_url == "postgresql://env/b"


def test_the_listener_uses_the_databases_address_unless_it_has_its_own(load: Load) -> None:
    assert load(DATABASE_URL="postgresql://p/x").database_listen_url == "postgresql://p/x"
    settings = load(DATABASE_URL="postgresql://p/x", DATABASE_LISTEN_URL="postgresql://d/x")
    assert settings.database_listen_url == "postgresql://d/x"
    assert settings.database_url == "postgresql://p/x"


def test_without_an_address_the_database_is_the_local_one_with_the_password_devpass(
    load: Load,
) -> None:
    assert load().database_url == "postgresql://postgres:devpass@localhost:5432/orchestrator"


@pytest.mark.parametrize("password", ["p@ss:w/rd?#%", "a b+c", "ü€", "$HOME", "'quoted'"])
def test_a_password_of_any_characters_arrives_at_the_driver_as_it_is(
    load: Load, password: str
) -> None:
    url = load(DB_PASSWORD=password).database_url
    parsed = psycopg2.extensions.parse_dsn(url)
    assert parsed["password"] == password
    assert (parsed["host"], parsed["dbname"]) == ("localhost", "orchestrator")


def test_dotenv_expands_nothing_in_a_password(load: Load) -> None:
    url = load("", "DB_PASSWORD='a${HOME}b'", HOME="/root").database_url
    assert psycopg2.extensions.parse_dsn(url)["password"] == "a${HOME}b"


def test_settings_cannot_be_changed_once_they_are_read(load: Load) -> None:
    settings = load()
    with pytest.raises(ValidationError, match="frozen"):
        settings.retry.max_retry = 5  # type: ignore[misc]


# --- backends --------------------------------------------------------------------------------

OPENAI = 'api = "openai"\nurl = "http://x"'


def test_both_routes_speak_ollama_s_api_unless_the_file_says_otherwise(load: Load) -> None:
    assert [load().backends.of_route(route).api for route in ("local", "cloud")] == ["ollama"] * 2
    backends = load(f"[backends.cloud]\n{OPENAI}").backends
    assert [backends.of_route(route).api for route in ("local", "cloud")] == ["ollama", "openai"]


def test_the_key_of_a_route_is_in_the_variable_that_its_key_env_names(load: Load) -> None:
    toml = f'[backends.local]\n{OPENAI}\nkey_env = "A"\n[backends.cloud]\n{OPENAI}\nkey_env = "B"'
    keys = load(toml, "A=of-dotenv\nB=of-dotenv", B="of-the-environment").api_keys
    assert {route: key.get_secret_value() for route, key in keys.items()} == {
        "local": "of-dotenv",
        "cloud": "of-the-environment",
    }
    assert "of-dotenv" not in repr(load(toml, "A=of-dotenv"))
    assert load(toml, "").api_keys == {}
    assert load(f"[backends.local]\n{OPENAI}", A="x").api_keys == {}


# --- tools -----------------------------------------------------------------------------------


def test_the_built_in_tools_are_there_without_being_named(load: Load) -> None:
    assert dict(load().tools) == BUILT_IN_TOOLS
    assert set(BUILT_IN_TOOLS) == {"echo", "sleep", "fetch_data", "flaky", "http_get"}


def test_a_file_adds_replaces_and_takes_away_tools(load: Load) -> None:
    tools = load(
        '[tools]\necho = "mine.tools:say"\nhttp_get = false\nMy-tool_2 = "a:b"\n'
        'far = { mcp = { url = "https://tools.example/mcp", tool = "add" } }\n'
        '[tools.near.mcp]\ncommand = ["program", "--flag"]\nenv = ["KEY"]'
    ).tools
    assert {
        name: {**tools, "echo": BUILT_IN_TOOLS["echo"]}.get(name) for name in BUILT_IN_TOOLS
    } == {**BUILT_IN_TOOLS, "http_get": None}
    assert (tools["echo"], tools["My-tool_2"]) == ("mine.tools:say", "a:b")
    far, near = tools["far"], tools["near"]
    assert isinstance(far, McpTool)
    assert isinstance(near, McpTool)
    assert (far.mcp.url, far.mcp.tool) == ("https://tools.example/mcp", "add")
    assert (near.mcp.command, near.mcp.env) == (("program", "--flag"), ("KEY",))


# --- the shipped file ------------------------------------------------------------------------


def sections() -> dict[str, type[Section]]:
    fields = Settings.model_fields.items()
    return {
        name: field.annotation
        for name, field in fields
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


@pytest.mark.parametrize("name", sections())
def test_the_shipped_file_names_every_setting_with_its_built_in_default(
    tmp_path: Path, name: str
) -> None:
    written = tomli.loads(SHIPPED.read_text(encoding="utf-8"))[name]
    assert list(written) == list(sections()[name].model_fields)
    copy = tmp_path / "config.toml"  # beside the shipped one there may be an .env
    copy.write_bytes(SHIPPED.read_bytes())
    assert getattr(load_config(copy, {}), name) == sections()[name]()


def test_the_shipped_file_has_no_section_besides_those() -> None:
    assert set(tomli.loads(SHIPPED.read_text(encoding="utf-8"))) == {
        *sections(),
        "tools",
        "graphs",
    }


def test_the_shipped_file_names_the_built_in_tools() -> None:
    assert tomli.loads(SHIPPED.read_text(encoding="utf-8"))["tools"] == BUILT_IN_TOOLS


def test_the_shipped_file_names_the_built_in_graph() -> None:
    assert tomli.loads(SHIPPED.read_text(encoding="utf-8"))["graphs"] == BUILT_IN_GRAPHS


def test_pool_size_comes_from_the_environment_before_the_file() -> None:
    assert load_config(SHIPPED, {"POOL_SIZE": "9"}).agents.pool_size == 9
    with pytest.raises(ConfigError, match=r"agents\.pool_size = 'many'"):
        load_config(SHIPPED, {"POOL_SIZE": "many"})


def test_the_built_in_graph_cannot_be_another() -> None:
    with pytest.raises(ValueError, match="give your graph another name"):
        Settings(graphs={"team": "a:b"}, database_url="x", database_listen_url="x")


def settings_in(section: type[Section]) -> int:
    kinds = [field.annotation for field in section.model_fields.values()]
    inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return len(kinds) - len(inner) + sum(map(settings_in, inner))


def test_every_key_of_the_shipped_file_has_a_comment() -> None:
    keys = [
        line
        for line in SHIPPED.read_text(encoding="utf-8").splitlines()
        if "=" in line and line[0] not in "#["
    ]
    settings = sum(map(settings_in, sections().values()))
    assert len(keys) == settings + len(BUILT_IN_TOOLS) + len(BUILT_IN_GRAPHS)
    assert [key for key in keys if not re.search(r"\s#\s\S+", key)] == []


# --- processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["scheduler.py"], ["-c", "import main"]], ids=["worker", "api"]
)
@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[worker]\nlease_seconds = 10", "under three heartbeats"),
        ("[retry]\nretries = 3", "retry.retries is not a known setting"),
        (None, "cannot be read"),
    ],
    ids=["short lease", "unknown key", "no file"],
)
def test_a_process_does_not_start_on_bad_settings_and_says_which_key_and_why(
    tmp_path: Path, command: list[str], toml: str | None, says: str
) -> None:
    file = tmp_path / "other.toml"
    if toml is not None:
        file.write_text(toml)
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env={"ORCHESTRATOR_CONFIG": str(file)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "other.toml: " in ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("given", ["sk-secret\n", "  sk-secret", "sk-secret\r\n"])
def test_a_key_from_a_file_loses_the_line_break_at_its_end(tmp_path: Path, given: str) -> None:
    (tmp_path / "config.toml").touch()
    settings = load_config(tmp_path / "config.toml", {"OLLAMA_API_KEY": given})
    assert settings.ollama_api_key is not None
    assert settings.ollama_api_key.get_secret_value() == "sk-secret"


@pytest.mark.parametrize("given", ["sk secret", "sk-sécret", "sk\nsecret", "sk\x7fsecret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_quoted(
    tmp_path: Path, given: str
) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"^OLLAMA_API_KEY holds a space") as refused:
        load_config(tmp_path / "config.toml", {"OLLAMA_API_KEY": given})
    assert "secret" not in str(refused.value)
