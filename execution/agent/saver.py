"""Checkpoints of an agent job, written only by the worker that holds its task.

LangGraph's saver writes through one door, its `_cursor(pipeline=True)`. Here that door keeps the
statements and sends them as one message. The first of them holds the task's row by its lease token
or fails, so that a worker whose lease was taken over writes nothing; and each checkpoint of the
graph itself comes with the row that people are shown.

Postgres begins with a message when it has the whole of it, and such a message is one transaction: a
process that is frozen, wherever that is, holds no row. The door is a private method:
langgraph-checkpoint-postgres is pinned to 3.2.

LangGraph's own checkpoint before the first node, and what a node wrote that ran alone, are followed
by a checkpoint at once, and wait for it. The writes of a node are for the case that no checkpoint
follows: they are sent then, and else, behind their checkpoint, nobody would read them. So a node is
one transaction, and the next begins when that is committed.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.constants import START
from langgraph.types import Send
from psycopg import ClientCursor

from errors import OrchestratorError, SchemaOutdated
from execution.agent.clock import go_on_behind
from execution.agent.connections import (
    CheckpointPool,
    Connection,
    Reader,
    in_plain_words,
    open_pool,
)
from execution.agent.shown import MOST_BYTES, shown
from pool import looks_alive
from queries.jobs import HOLD_LEASE, READ_TABLES_VERSION, SHOW_STATE
from queries.leases import ClaimedTask

__all__ = ["CheckpointPool", "FencedSaver", "open_pool", "shown"]

TASKS = "__pregel_tasks"  # LangGraph's channel of Sends
NODE_PATH = "~__pregel_pull, "  # where a task stands that is a node, and no Send or call of one
LONGEST_MESSAGE = 2**30 - 6  # bytes; behind a longer one Postgres hangs up

Statement = tuple[str, list[Any]]  # and for which values it is run


class _Writer:
    """What LangGraph writes with: it keeps the statements until all of them are sent."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def execute(self, query: str, params: Any = None) -> None:
        self.statements.append((query, [params]))

    def executemany(self, query: str, params_seq: Iterable[Any]) -> None:
        self.statements.append((query, list(params_seq)))


def _send(conn: Connection, statements: Sequence[Statement]) -> None:
    """One message, which is one transaction."""
    with ClientCursor(conn) as cursor:
        texts = chain.from_iterable(_texts(cursor, *each) for each in statements)
        message = (conn.limits + ";".join(texts)).encode()
        if len(message) > LONGEST_MESSAGE:
            raise ValueError(f"{len(message)} bytes are more than Postgres takes at once")
        cursor.execute(message)


ADDS_ROWS = re.compile(r"(INSERT INTO [^%]* VALUES )(\([%s, ]*\))( ON CONFLICT [^%]* DO NOTHING)")


def _texts(cursor: ClientCursor[Any], query: str, all_params: list[Any]) -> list[str]:
    """The statement for each of these; where it only adds rows, one statement for all of them."""
    adds = ADDS_ROWS.fullmatch(" ".join(query.split())) if len(all_params) > 1 else None
    if adds is None:
        return [cursor.mogrify(query, params) for params in all_params]
    before, row, behind = adds.groups()
    return [before + ", ".join(cursor.mogrify(row, params) for params in all_params) + behind]


class FencedSaver(PostgresSaver):
    """The saver of one job, for as long as its task is leased with this token.

    Raises LeaseLost once it is not, and DatabaseUnavailable while Postgres is away.
    """

    def __init__(
        self,
        pool: CheckpointPool,
        task: ClaimedTask,
        graph_version: str,
        max_state_bytes: int = MOST_BYTES,
        is_new: bool = False,
        opening_waits: bool = False,
        keeps_writes: bool = True,
    ) -> None:
        """`is_new`: the job has no checkpoint, which the one who holds its lease can know.
        `opening_waits`: nothing of the graph runs behind LangGraph's first checkpoint.
        `keeps_writes`: a checkpoint of this graph cannot be read without what led to it."""
        super().__init__(pool)  # type: ignore[arg-type]  # a pool of a subclass
        self._pool = pool
        self._task_id = task.task_id
        self._fence = {"task_id": task.task_id, "token": task.lease.token}
        self._graph_version = graph_version
        self._max_state_bytes = max_state_bytes
        self._is_new = is_new
        self._opening_waits = opening_waits
        self._keeps_writes = keeps_writes
        self.raised: list[Exception] = []  # here, and not by a node
        self.ended_with: Mapping[str, Any] | None = None  # the graph's channels at its end
        self._in_this_thread = threading.local()  # LangGraph writes from several
        self._one_runs_from = ""  # the checkpoint behind which one node alone runs
        # What waits for a checkpoint: another one, and the writes of a node.
        self._opening: list[Statement] = []
        self._node_writes: list[Statement] = []

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that the job goes on from; those it makes from now on are newer."""
        if self._is_new:
            return None
        found = super().get_tuple(config)
        if found is not None:
            go_on_behind(found.checkpoint["id"])
        return found

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint; one of the graph itself, not of a graph in it, with what is shown."""
        this = self._in_this_thread
        values = checkpoint["channel_values"]
        state = None
        if config["configurable"].get("checkpoint_ns", "") == "":
            state = self._state(config, checkpoint)
            self._is_new = False
            self._one_runs_from = checkpoint["id"] if _is_one_task(state, values) else ""
        this.state = state
        waits = self._opening_waits and state is not None and state["next_nodes"] == [START]
        this.waits_in = self._opening if waits else None
        try:
            fit = {k: _storable(v) for k, v in values.items()}
            saved: Checkpoint = {**checkpoint, "channel_values": fit}
            config_of_saved = super().put(config, saved, metadata, new_versions)
        finally:
            this.state = this.waits_in = None
        if state and not state["next_nodes"]:
            self.ended_with = values
        return config_of_saved

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Save what a node wrote: at once, if others run beside it or it has not ended well."""
        this = self._in_this_thread
        waits = (
            config["configurable"]["checkpoint_id"] == self._one_runs_from
            and task_path.startswith(NODE_PATH)
            and not any(channel in WRITES_IDX_MAP for channel, _ in writes)
        )
        this.waits_in = self._node_writes if waits else None
        try:
            super().put_writes(config, writes, task_id, task_path)
        finally:
            this.waits_in = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block in which the graph runs: what waits for a checkpoint is sent if none comes."""
        try:
            yield
        except OrchestratorError:
            raise  # nothing can be sent
        except BaseException:
            with suppress(Exception):  # it was found out too late to be told
                self.flush()
            raise

    def flush(self) -> None:
        """Send what waits for a checkpoint."""
        if self._opening or self._node_writes:
            self._send([])

    def _state(self, config: RunnableConfig, checkpoint: Checkpoint) -> dict[str, Any]:
        values = checkpoint["channel_values"]
        return {
            "task_id": self._task_id,
            "checkpoint_id": checkpoint["id"],
            "parent_id": config["configurable"].get("checkpoint_id"),
            "next_nodes": next_nodes(values),
            "graph_version": self._graph_version,
            "state": json.dumps(shown(values, self._max_state_bytes), ensure_ascii=False),
        }

    def _dump_blobs(
        self, thread_id: str, checkpoint_ns: str, values: dict[str, Any], versions: ChannelVersions
    ) -> list[tuple[str, str, str, str, str, bytes | None]]:
        whole = {k: v.value if isinstance(v, _Blob) else v for k, v in values.items()}
        return super()._dump_blobs(thread_id, checkpoint_ns, whole, versions)

    @contextmanager
    def _cursor(self, *, pipeline: bool = False) -> Iterator[Any]:
        """What LangGraph reads with or, with `pipeline`, writes with: sent when the block ends."""
        if not pipeline:
            self.flush()
            with self._connection() as conn, Reader(conn) as reader:
                yield reader
            return
        this = self._in_this_thread
        writer = _Writer()
        yield writer
        if (state := getattr(this, "state", None)) is not None:
            writer.execute(SHOW_STATE, state)
        if (waiting := getattr(this, "waits_in", None)) is not None:
            waiting += writer.statements
            return
        self._send(writer.statements)

    def _send(self, statements: Sequence[Statement]) -> None:
        """With what waits; it does so no longer when all of it is committed."""
        state = getattr(self._in_this_thread, "state", None)
        with self._connection() as conn:
            opening, writes = [*self._opening], [*self._node_writes]
            before = opening if state and not self._keeps_writes else opening + writes
            _send(conn, [(HOLD_LEASE, [self._fence]), *before, *statements])
            del self._opening[: len(opening)], self._node_writes[: len(writes)]

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """The job's only one at this moment; no server has said goodbye to it."""
        try:
            with in_plain_words(), self.lock:
                conn = self._live_connection()
                try:
                    _require_tables(self._pool, conn)
                    yield conn
                finally:
                    self._pool.putconn(conn)
        except OrchestratorError as ended:
            self.raised.append(ended)
            raise

    def _live_connection(self) -> Connection:
        while not looks_alive(conn := self._pool.getconn()):
            conn.close()
            self._pool.putconn(conn)
        return conn


# Pools whose database has been looked at: once per process.
_looked_at: weakref.WeakSet[CheckpointPool] = weakref.WeakSet()


def _require_tables(pool: CheckpointPool, conn: Connection) -> None:
    """SchemaOutdated if LangGraph's tables are not those that its installed package writes to."""
    if pool in _looked_at:
        return
    row = Reader(conn).execute(READ_TABLES_VERSION).fetchone()
    found, wanted = row and row["version"], len(PostgresSaver.MIGRATIONS) - 1
    if found != wanted:
        raise SchemaOutdated(
            f"LangGraph's tables in the database are of version {found}, the installed "
            f"langgraph-checkpoint-postgres needs {wanted}; "
            "install the version that requirements-agents.txt asks for"
        )
    _looked_at.add(pool)


class _Blob:
    """A value that LangGraph would put into the checkpoint's JSON, and that JSON cannot hold."""

    def __init__(self, value: object) -> None:
        self.value = value


LARGEST_FLOAT = 1e15  # from 1e16 on, jsonb gives back an integer


def _storable(value: Any) -> Any:
    """LangGraph keeps the texts and numbers of a state in jsonb; these go where the rest goes."""
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        return _Blob(value)
    if isinstance(value, float) and not abs(value) < LARGEST_FLOAT:  # NaN is not, either
        return _Blob(value)
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_one_task(state: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether one node, and that once, is to run behind a checkpoint."""
    return len(state["next_nodes"]) == 1 and not values.get(TASKS)


def next_nodes(values: Mapping[str, Any]) -> list[str]:
    """The nodes that are to run behind a checkpoint with these channels, as LangGraph finds them.

    An edge or a branch to a node is a channel `branch:to:node`, several that meet are one
    `join:a+b:node`; where the node is deferred, the value comes with whether its time has come.
    """
    found = {send.node for send in values.get(TASKS, ()) if isinstance(send, Send)}
    for channel, value in values.items():
        if channel == START:
            found.add(channel)
        elif channel.startswith("branch:to:") and not _is_deferred(value):
            found.add(channel.removeprefix("branch:to:"))
        elif channel.startswith("join:") and not _is_deferred(value):
            sources, _, node = channel.removeprefix("join:").rpartition(":")
            arrived = value[0] if isinstance(value, tuple) else value
            if len("+".join(arrived)) == len(sources):
                found.add(node)
    return sorted(found)


def _is_deferred(value: Any) -> bool:
    return isinstance(value, tuple) and not value[1]
