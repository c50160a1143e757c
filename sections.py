"""The tables of config.toml, each with its defaults and what its values may be; see config.py."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)

LARGEST_COUNT = 1_000_000_000  # no more than an integer of Postgres
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT)]
AtLeastOne = Annotated[int, Field(strict=True, ge=1, le=LARGEST_COUNT)]
Tokens = Annotated[int, Field(strict=True, ge=0, le=1_000_000_000_000_000)]


def _number(value: object) -> object:
    """Let TOML's numbers through and nothing that only looks like one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError("this is to be a number, without quotes")
    return float(value)


def _is_an_address(url: str) -> str:
    """Let through what has a host, and a port that can be."""
    if not urlsplit(url).hostname or urlsplit(url).port == 0:  # both may raise ValueError
        raise ValueError("this is to be an address: http://HOST:PORT")
    return url


LONGEST_SECONDS = 31_536_000  # a year
Seconds = Annotated[
    float, BeforeValidator(_number), Field(gt=0, le=LONGEST_SECONDS, allow_inf_nan=False)
]
# Postgres counts in milliseconds, and takes none of them for no limit.
LimitSeconds = Annotated[Seconds, Field(ge=0.001)]
Money = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]
HttpUrl = Annotated[
    str, Field(strict=True, pattern=r"^https?://[^\s/]+"), AfterValidator(_is_an_address)
]
Name = Annotated[str, Field(strict=True, min_length=1)]
LONGEST_DAYS = 36_500  # a century; Postgres cannot go back as far as an integer could
Days = Annotated[int, Field(strict=True, ge=0, le=LONGEST_DAYS)]
VariableName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_]\w*$")]


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
    tenant_tokens_per_day: Tokens = 0


class Retention(Section):
    finished_days: Days = 0
    audit_days: Days = 0
    checkpoints_days: Days = 0


MOST_REVISIONS = 1000


class Agents(Section):
    pool_size: AtLeastOne = 4
    max_revisions: Annotated[Count, Field(le=MOST_REVISIONS)] = 2
    recursion_limit: AtLeastOne = 25


class Callbacks(Section):
    timeout_seconds: Seconds = 30
    max_retry: AtLeastOne = 10
    max_delay_seconds: Seconds = 3600
    allow_private_addresses: StrictBool = False


class DatabaseSettings(Section):
    pool_size: AtLeastOne = 8
    pool_wait_seconds: Seconds = 5
    connect_timeout_seconds: Seconds = 5
    reply_timeout_seconds: LimitSeconds = 30
    lock_timeout_seconds: LimitSeconds = 5


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

TEAM = "team"  # the graph of a job that names none
BUILT_IN_GRAPHS = {TEAM: "execution.agent.team:build"}


def _with_built_in_graphs(given: object) -> object:
    if not isinstance(given, dict):
        return given
    if TEAM in given and given[TEAM] != BUILT_IN_GRAPHS[TEAM]:
        raise ValueError(f"{TEAM} is built in; give your graph another name")
    return {**BUILT_IN_GRAPHS, **given}


Graphs = Annotated[Mapping[ToolName, Function], BeforeValidator(_with_built_in_graphs)]
