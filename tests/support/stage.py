"""Two sessions that meet: the first has done all but its COMMIT when the second comes.

It stops there, with its locks, at a gate that the test opens. Who waits is read from
pg_stat_activity, not guessed from time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from db import Connection
from tests.support.processes import eventually
from tests.support.rows import sql

Connect = Callable[[], Connection]
AT_ONCE = 0.05  # seconds that one who never waits is given for a lock
PATIENCE = 25  # seconds for one who waits, until the test has seen it

# The gate is closed while the test holds the lock 4711, for sessions that stop at it.
GATE = """
CREATE FUNCTION stop_at_the_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('tests.stops_at_the_gate', true) = 'yes' THEN
        PERFORM pg_advisory_xact_lock_shared(4711);
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER gate AFTER INSERT OR UPDATE ON tasks DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION stop_at_the_gate();
"""


class Stage:
    """Runs calls beside the test, each on a connection of its own."""

    def __init__(self, connect: Connect, threads: ThreadPoolExecutor) -> None:
        self.connect = connect
        self.threads = threads
        self.witness = connect()

    def start(self, call: Callable[..., Any], *args: Any) -> tuple[int, Future[Any]]:
        conn = self.connect()
        conn.lock_timeout_seconds = PATIENCE
        pid = conn.info.backend_pid
        return pid, self.threads.submit(call, conn, *args)

    def waits_for(self, pid: int) -> str | None:
        """The kind of lock for which that session waits."""
        statement = """
            SELECT wait_event FROM pg_stat_activity
            WHERE pid = %(pid)s AND wait_event_type = 'Lock'
        """
        found = sql(self.witness, statement, pid=pid)
        return found[0]["wait_event"] if found else None

    def await_lock(self, pid: int, call: Future[Any]) -> str:
        """Until that session waits for a lock; which kind. Its call must not end first."""

        def look() -> str | None:
            if call.done():
                raise RuntimeError(f"it did not wait: {call.result()}")
            return self.waits_for(pid)

        return str(eventually(look))

    @contextmanager
    def held_back(self, call: Callable[..., Any], *args: Any) -> Iterator[Future[Any]]:
        """The call has done everything but its COMMIT, which it does after the block."""
        sql(self.witness, "SELECT pg_advisory_lock(4711)")
        try:
            conn = self.connect()
            sql(conn, "SELECT set_config('tests.stops_at_the_gate', 'yes', false)")
            conn.lock_timeout_seconds = PATIENCE
            first = self.threads.submit(call, conn, *args)
            assert self.await_lock(conn.info.backend_pid, first) == "advisory"
            yield first
        finally:
            sql(self.witness, "SELECT pg_advisory_unlock(4711)")
        first.result(20)

    def is_free(self, task_id: int) -> bool:
        """Whether nobody has locked that row."""
        statement = """
            SELECT task_id FROM tasks WHERE task_id = %(task_id)s FOR UPDATE SKIP LOCKED
        """
        return bool(sql(self.witness, statement, task_id=task_id))
