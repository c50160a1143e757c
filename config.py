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
from typing import Any
from urllib.parse import quote

import tomli
from dotenv import dotenv_values
from psycopg2 import ProgrammingError
from psycopg2.extensions import parse_dsn
from pydantic import Field, SecretStr, ValidationError, model_validator

from sections import (
    BUILT_IN_GRAPHS,
    BUILT_IN_TOOLS,
    FUNCTION,
    LONGEST_LIST,
    MOST_REVISIONS,
    TABLE,
    TEAM,
    Agents,
    Backends,
    Callbacks,
    Cost,
    DatabaseSettings,
    Graphs,
    HttpGet,
    Limits,
    Mcp,
    McpServer,
    McpTool,
    Models,
    Name,
    Ollama,
    Retention,
    Retry,
    Routing,
    Section,
    Tools,
    WorkerSettings,
)

__all__ = [
    "BUILT_IN_TOOLS",
    "LONGEST_LIST",
    "MOST_REVISIONS",
    "ROOT",
    "TEAM",
    "ConfigError",
    "DatabaseSettings",
    "HttpGet",
    "Limits",
    "McpServer",
    "McpTool",
    "Retry",
    "Routing",
    "Section",
    "Settings",
    "WorkerSettings",
    "current_config",
    "load_config",
]

ROOT = Path(__file__).resolve().parent


class ConfigError(Exception):
    """The settings cannot be used; the text names the key and says why."""


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
    agents: Agents = Agents()
    callbacks: Callbacks = Callbacks()
    graphs: Graphs = Field(default_factory=lambda: dict(BUILT_IN_GRAPHS))
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
    if env.get("POOL_SIZE"):
        size = int(env["POOL_SIZE"]) if env["POOL_SIZE"].isdecimal() else env["POOL_SIZE"]
        sections["agents"] = {**_table(file, sections, "agents"), "pool_size": size}
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
