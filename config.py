"""Settings: config.toml, .env and the environment in, one frozen, validated object out.

Order, later wins: built-in default, config.toml, .env, environment, command line.
Whatever is wrong raises ConfigError with the key to blame; a process that cannot read
its settings does not start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import tomli
from dotenv import dotenv_values
from psycopg2 import ProgrammingError
from psycopg2.extensions import parse_dsn
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    StrictBool,
    Tag,
    ValidationError,
    model_validator,
)

ROOT = Path(__file__).resolve().parent

Count = Annotated[int, Field(strict=True, ge=0)]
AtLeastOne = Annotated[int, Field(strict=True, ge=1)]


def _number(value: object) -> object:
    """Let TOML's numbers through and nothing that only looks like one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError("this is to be a number, without quotes")
    return float(value)


Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Money = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]
HttpUrl = Annotated[str, Field(strict=True, pattern=r"^https?://[^\s/]+")]
Name = Annotated[str, Field(strict=True, min_length=1)]
LONGEST_DAYS = 36_500  # a century; Postgres cannot go back as far as an integer could
Days = Annotated[int, Field(strict=True, ge=0, le=LONGEST_DAYS)]
VariableName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_]\w*$")]


class ConfigError(Exception):
    """The settings cannot be used; the text names the key and says why."""


class Section(BaseModel):
    """One table of config.toml: frozen, and a key it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Retry(Section):
    max_retry: AtLeastOne = 3
    max_delivery: AtLeastOne = 3
    max_delay_seconds: Seconds = 60


class Routing(Section):
    prompt_threshold: Count = 100
    pending_threshold: Count = 5
    fallback: StrictBool = False
    local_max_in_flight: Count = 0
    cloud_max_in_flight: Count = 0

    def max_in_flight(self, route: str) -> int:
        """The most calls at once on `route`, of all workers; 0: no limit."""
        return self.cloud_max_in_flight if route == "cloud" else self.local_max_in_flight


class Models(Section):
    local: Name = "llama3.2:latest"
    cloud: Name = "qwen3:14b"

    def of_route(self, route: str) -> str:
        """The model that serves `route` (local or cloud)."""
        return self.cloud if route == "cloud" else self.local


class Cost(Section):
    local_per_token: Money = Decimal("0.00001")
    cloud_per_token: Money = Decimal("0.0001")
    local_prompt_per_token: Money = Decimal("0")
    cloud_prompt_per_token: Money = Decimal("0")

    def of_call(self, route: str, prompt_tokens: int, completion_tokens: int) -> Decimal:
        """What a call of so many tokens on `route` costs, exactly."""
        if route == "cloud":
            prompt_rate, completion_rate = self.cloud_prompt_per_token, self.cloud_per_token
        else:
            prompt_rate, completion_rate = self.local_prompt_per_token, self.local_per_token
        return prompt_tokens * prompt_rate + completion_tokens * completion_rate


class Ollama(Section):
    url: HttpUrl = "http://localhost:11434"
    cloud_url: HttpUrl | Literal[""] = ""
    timeout_seconds: Seconds = 60
    connect_timeout_seconds: Seconds = 5
    num_ctx: AtLeastOne = 4096
    num_predict: AtLeastOne = 1024

    def url_of_route(self, route: str) -> str:
        """The server behind `route`."""
        return self.cloud_url if route == "cloud" and self.cloud_url else self.url


class BackendSettings(Section):
    """Where a route's calls go: Ollama's API (its addresses are in [ollama]), or OpenAI's."""

    api: Literal["ollama", "openai"] = "ollama"
    url: HttpUrl | Literal[""] = ""
    key_env: VariableName | Literal[""] = ""
    limit_as: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"

    @model_validator(mode="after")
    def has_one_address(self) -> BackendSettings:
        if self.api == "openai" and not self.url:
            raise ValueError('api = "openai" needs url, the address of the server')
        if self.api == "ollama" and (self.url or self.key_env or self.limit_as != "max_tokens"):
            raise ValueError(
                'url, key_env and limit_as go with api = "openai"; the addresses of Ollama are '
                "ollama.url and ollama.cloud_url, its key is OLLAMA_API_KEY"
            )
        return self


class Backends(Section):
    local: BackendSettings = BackendSettings()
    cloud: BackendSettings = BackendSettings()

    def of_route(self, route: str) -> BackendSettings:
        """What serves `route` (local or cloud)."""
        return self.cloud if route == "cloud" else self.local


class WorkerSettings(Section):
    concurrency: AtLeastOne = 4
    lease_seconds: Seconds = 30
    heartbeat_seconds: Seconds = 10
    reap_seconds: Seconds = 5
    poll_seconds: Seconds = 5
    grace_seconds: Seconds = 30
    task_timeout_seconds: Seconds = 3600

    @model_validator(mode="after")
    def lease_outlives_two_missed_heartbeats(self) -> WorkerSettings:
        if self.lease_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds = {self.lease_seconds:g} is under three heartbeats "
                f"(heartbeat_seconds = {self.heartbeat_seconds:g}): a task would be taken from "
                f"a healthy worker after one late beat; set it to "
                f"{3 * self.heartbeat_seconds:g} or more"
            )
        return self


LONGEST_LIST = 10_000  # of tasks, steps or names that any request may hold


class Limits(Section):
    max_prompt_bytes: AtLeastOne = 1024 * 1024
    max_metadata_bytes: AtLeastOne = 16 * 1024
    max_body_bytes: AtLeastOne = 8 * 1024 * 1024
    max_body_values: AtLeastOne = 100_000
    max_result_bytes: AtLeastOne = 16 * 1024 * 1024
    max_error_bytes: AtLeastOne = 8 * 1024
    max_wait_seconds: Seconds = 60
    max_delay_seconds: Seconds = 31_536_000
    max_batch_tasks: Annotated[AtLeastOne, Field(le=LONGEST_LIST)] = 1000
    max_run_steps: Annotated[AtLeastOne, Field(le=LONGEST_LIST)] = 1000
    max_run_edges: Annotated[AtLeastOne, Field(le=10 * LONGEST_LIST)] = 5000
    max_step_references: AtLeastOne = 1000
    max_goal_bytes: AtLeastOne = 16 * 1024
    key_cache_seconds: Seconds = 5
    ticket_seconds: Seconds = 60
    tenant_requests_per_minute: Count = 0
    tenant_queued_tasks: Count = 0


class Retention(Section):
    finished_days: Days = 0
    audit_days: Days = 0


class DatabaseSettings(Section):
    pool_size: AtLeastOne = 8
    pool_wait_seconds: Seconds = 5
    connect_timeout_seconds: Seconds = 5
    reply_timeout_seconds: Seconds = 30
    lock_timeout_seconds: Seconds = 5


class HttpGet(Section):
    timeout_seconds: Seconds = 30
    max_bytes: AtLeastOne = 1024 * 1024
    allow_private_addresses: StrictBool = False


class Mcp(Section):
    start_timeout_seconds: Seconds = 30


class McpServer(Section):
    """Where an MCP server is: a command that speaks on its standard input and output, or a URL."""

    command: tuple[Annotated[str, Field(strict=True)], ...] | None = None
    url: HttpUrl | None = None
    tool: Name | None = None  # its name there, if it is another one
    env: tuple[Name, ...] = ()  # variables of the worker's environment that the command gets
    token_env: Name | None = None  # the variable whose value is sent to the URL as Bearer token

    @model_validator(mode="after")
    def is_in_one_place(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("it takes either command or url")
        if self.command is not None and not (self.command and self.command[0]):
            raise ValueError("command is to be a program and its arguments")
        if self.env and self.command is None:
            raise ValueError("env goes with command")
        if self.token_env and self.url is None:
            raise ValueError("token_env goes with url")
        return self


class McpTool(Section):
    mcp: McpServer


BUILT_IN_TOOLS = {
    "echo": "execution.tools.builtin:echo",
    "sleep": "execution.tools.builtin:sleep",
    "fetch_data": "execution.tools.builtin:fetch_data",
    "flaky": "execution.tools.builtin:flaky",
    "http_get": "execution.tools.http_get:http_get",
}


def _with_built_in_tools(given: object) -> object:
    """The tools that there are: the built-in ones and those of the file, without what is false."""
    if not isinstance(given, dict):
        return given
    for name, entry in given.items():
        if entry is False and name not in BUILT_IN_TOOLS:
            raise ValueError(f"{name} = false takes nothing away: no tool of that name is built in")
    every = {**BUILT_IN_TOOLS, **given}
    return {name: entry for name, entry in every.items() if entry is not False}


# What the kinds of a tool's entry are called in pydantic's errors; left out of ours.
FUNCTION, TABLE = "<function>", "<table>"


def _kind_of_tool(entry: object) -> str | None:
    if isinstance(entry, str):
        return FUNCTION
    return TABLE if isinstance(entry, (dict, McpTool)) else None


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Function = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
ToolEntry = Annotated[
    Annotated[Function, Tag(FUNCTION)] | Annotated[McpTool, Tag(TABLE)],
    Discriminator(
        _kind_of_tool,
        custom_error_type="tool",
        custom_error_message='a tool is "module:function", { mcp = { … } } or false',
    ),
]
Tools = Annotated[Mapping[ToolName, ToolEntry], BeforeValidator(_with_built_in_tools)]


class Settings(Section):
    """Everything a process needs to know, read once by its entry point and passed on."""

    retry: Retry = Retry()
    routing: Routing = Routing()
    models: Models = Models()
    cost: Cost = Cost()
    ollama: Ollama = Ollama()
    backends: Backends = Backends()
    worker: WorkerSettings = WorkerSettings()
    limits: Limits = Limits()
    retention: Retention = Retention()
    database: DatabaseSettings = DatabaseSettings()
    http_get: HttpGet = HttpGet()
    mcp: Mcp = Mcp()
    tools: Tools = Field(default_factory=lambda: dict(BUILT_IN_TOOLS))
    database_url: Name
    database_listen_url: Name
    ollama_api_key: SecretStr | None = None
    api_keys: Mapping[str, SecretStr] = {}  # by route: what the variable of its key_env holds

    @model_validator(mode="after")
    def the_cloud_is_one_server(self) -> Settings:
        if self.backends.cloud.api == "openai" and self.ollama.cloud_url:
            raise ValueError(
                'ollama.cloud_url is not used with backends.cloud.api = "openai"; leave one out'
            )
        return self


def load_config(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read and validate the settings, or raise ConfigError.

    `path` defaults to ORCHESTRATOR_CONFIG, else config.toml beside this file (which may be
    absent: then the defaults stand). .env is read from the folder of that file.
    """
    given = os.environ if environ is None else environ
    file = Path(path or given.get("ORCHESTRATOR_CONFIG") or ROOT / "config.toml")
    env = {**_read_dotenv(file.parent / ".env"), **given}
    sections = _read_toml(file, must_exist=file != ROOT / "config.toml")
    for key in ("database_url", "database_listen_url", "ollama_api_key", "api_keys"):
        if key in sections:
            raise ConfigError(f"{file}: {key} belongs in the environment or in .env, not here")
    if env.get("OLLAMA_URL"):
        sections["ollama"] = {**_table(file, sections, "ollama"), "url": env["OLLAMA_URL"]}
    url = env.get("DATABASE_URL") or _default_database_url(env.get("DB_PASSWORD") or "devpass")
    listen_url = env.get("DATABASE_LISTEN_URL") or url
    for address in (url, listen_url):
        _check_database_url(address)
    try:
        settings = Settings.model_validate(
            {
                **sections,
                "database_url": url,
                "database_listen_url": listen_url,
                "ollama_api_key": _api_key("OLLAMA_API_KEY", env),
            }
        )
    except ValidationError as refused:
        raise ConfigError(f"{file}: {_in_plain_words(refused)}") from refused
    return settings.model_copy(update={"api_keys": _api_keys(settings.backends, env)})


@lru_cache(maxsize=1)
def current_config() -> Settings:
    """The settings of this process, for callers that were not handed any."""
    return load_config()


def _read_toml(file: Path, must_exist: bool) -> dict[str, Any]:
    if not file.exists() and not must_exist:
        return {}
    try:
        # Decimal keeps a rate such as 0.00001 exact when it is written without quotes.
        return tomli.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    except (OSError, UnicodeDecodeError) as failed:
        raise ConfigError(f"{file}: cannot be read: {failed}") from failed
    except tomli.TOMLDecodeError as failed:
        raise ConfigError(f"{file}: is not TOML: {failed}") from failed


def _read_dotenv(file: Path) -> dict[str, str]:
    values = dotenv_values(file, interpolate=False) if file.is_file() else {}
    return {key: value for key, value in values.items() if value is not None}


def _api_keys(backends: Backends, env: Mapping[str, str]) -> dict[str, SecretStr]:
    """The keys that there are; the API process, say, may do without those of the workers."""
    variables = {"local": backends.local.key_env, "cloud": backends.cloud.key_env}
    keys = {route: _api_key(name, env) for route, name in variables.items() if name}
    return {route: key for route, key in keys.items() if key is not None}


def _api_key(name: str, env: Mapping[str, str]) -> SecretStr | None:
    """The key in a variable. What no header can carry would be quoted in errors, for all to see."""
    key = env.get(name, "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise ConfigError(
            f"{name} holds a space, a line break or a character beyond ASCII; no key has those"
        )
    return SecretStr(key) if key else None


def _table(file: Path, sections: dict[str, Any], name: str) -> dict[str, Any]:
    table = sections.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name} is to be a table, [{name}]")
    return table


def _check_database_url(url: str) -> None:
    try:
        parse_dsn(url)
    except ProgrammingError as refused:
        reason = str(refused).strip()
        raise ConfigError(f"DATABASE_URL is no address of a database: {reason}") from refused


def _default_database_url(password: str) -> str:
    return f"postgresql://postgres:{quote(password, safe='')}@localhost:5432/orchestrator"


NO_KEYS = (FUNCTION, TABLE, "[key]")


def _in_plain_words(refused: ValidationError) -> str:
    problems = []
    for error in refused.errors():
        key = ".".join(str(part) for part in error["loc"] if part not in NO_KEYS)
        if error["type"] == "extra_forbidden":
            problems.append(f"{key} is not a known setting")
        elif error["type"] == "value_error":
            problems.append(": ".join(filter(None, [key, str(error["ctx"]["error"])])))
        else:
            problems.append(f"{key} = {error['input']!r}: {error['msg']}")
    return "; ".join(problems)
