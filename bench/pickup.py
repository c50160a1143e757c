"""From the commit of a task to the start of its work, on an idle worker; against bare loops.

    python -m bench.pickup

Both instants are read from CLOCK_MONOTONIC, which all processes of a machine share: the commit when
the submitter's statement has returned, the start by the first thing that the tool does. In the bare
loops the start is when the rows of the claim are there; one claims from a narrow table, the other
from ours, both by an UPDATE that chooses little. Any start may come a little before the commit:
Postgres wakes the listener before it answers the submitter, in all alike. Peers (bench/peers) have
a worker of their own each, and submit from their own client, with the same pauses.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psycopg2

import db
from bench.common import (
    ROOT,
    MeasureFailed,
    Stage,
    administrator,
    eventually,
    peers_python,
)
from bench.drain import BARE, LEAST, Peer, peers, version_of
from bench.peers import gate, least
from bench.report import Record, percentile, run
from bench.tool import TOOLS, await_starts, connected, noop_task

SUBMISSIONS = 200
PAUSE_SECONDS = (0.020, 0.050)
WARM_UP = 50  # submissions to a worker before any of them counts
REPETITIONS = 5
QUICK_REPETITIONS = 2
QUICK_SUBMISSIONS = 100
PAYLOAD = json.dumps({"seq": 1, "pad": "x" * 176})

# The bare loop is that of a queue without audit log, fence or retries.
BARE_TABLE = """
CREATE TABLE bare_tasks (
    id bigserial PRIMARY KEY,
    status text NOT NULL DEFAULT 'pending',
    payload jsonb NOT NULL,
    available_at timestamptz NOT NULL DEFAULT now(),
    lease_expires_at timestamptz,
    lease_owner text,
    retry_count int NOT NULL DEFAULT 0,
    delivery_count int NOT NULL DEFAULT 0
);
CREATE INDEX bare_tasks_pending ON bare_tasks (available_at, id) WHERE status = 'pending';
"""
BARE_SUBMIT = """
WITH created AS (INSERT INTO bare_tasks (payload) VALUES (%s) RETURNING id)
SELECT id, pg_notify('bare_tasks', '') FROM created
"""
BARE_CLAIM = """
UPDATE bare_tasks
SET status = 'leased', lease_owner = 'me', lease_expires_at = now() + interval '30 seconds',
    delivery_count = delivery_count + 1
WHERE id = ANY(ARRAY(
    SELECT id FROM bare_tasks WHERE status = 'pending' AND available_at <= now()
    ORDER BY available_at, id FOR UPDATE SKIP LOCKED LIMIT 10))
RETURNING id, payload
"""
# Prepared, for a worker's claim is a function that keeps its plans.
PREPARE_LEAST = "PREPARE claim AS " + least.CLAIM % {
    "token": "gen_random_uuid()",
    "owner": "'me'",
    "batch": "10",
}


def measure(stage: Stage, record: Record, quick: bool) -> None:
    submissions = QUICK_SUBMISSIONS if quick else SUBMISSIONS
    ours, bare, tables = stage.database(), stage.database("template0"), stage.database()
    stage.worker(ours, tools=TOOLS)
    others = list(waiting_peers(stage, record, quick))
    with connected(ours) as conn, administrator(bare) as cursor, connected(tables) as in_tables:
        cursor.execute(BARE_TABLE)
        narrow = BareLoop(bare, "bare_tasks", BARE_CLAIM, partial(submit_bare, cursor))
        wide = BareLoop(
            tables,
            "tasks_claimable",
            "EXECUTE claim",
            partial(submit_noop, in_tables),
            PREPARE_LEAST,
        )
        pickup_ms(conn, WARM_UP)  # plans, caches and connections are warm from here on
        loops: dict[str, Callable[[int], list[float]]] = {
            "pickup": partial(pickup_ms, conn),
            BARE.name: narrow.pickup_ms,
            **{other.peer.name: other.pickup_ms for other in others},
        }
        if not quick:
            loops[LEAST.name] = wide.pickup_ms
        for repetition in range(QUICK_REPETITIONS if quick else REPETITIONS):
            order = list(loops) if repetition % 2 else list(reversed(loops))
            times = {name: loops[name](submissions) for name in order}
            for share in (50, 99):
                compare(record, share, {n: percentile(times[n], share) for n in loops})


def compare(record: Record, share: int, found: dict[str, float]) -> None:
    """What one repetition has found at a percentile, of all that took part."""
    for name, milliseconds in found.items():
        record.add(f"{name} p{share}", milliseconds, "ms")
    own = found["pickup"]
    record.ratio(f"p{share} / bare LISTEN and claim", own / found[BARE.name])
    if LEAST.name in found:
        record.ratio(f"p{share} / the same in our tables", own / found[LEAST.name])
    peers = [found[name] for name in found if name not in ("pickup", BARE.name, LEAST.name)]
    if peers:
        record.ratio(f"p{share} / best peer", own / min(peers))


def waiting_peers(stage: Stage, record: Record, quick: bool) -> Iterator[PeerWorker]:
    """Their workers, ready; one that does not start or do its work is named."""
    for peer in who_else(record, quick):
        try:
            yield PeerWorker(stage, peer)
        except MeasureFailed as failed:
            record.note(f"{peer.name} is left out: {failed}")


def who_else(record: Record, quick: bool) -> list[Peer]:
    """The peers of the drain, and those that are good at this only; not those when in a hurry."""
    found = [peer for peer in peers(record, quick) if peer not in (BARE, LEAST)]
    if quick:
        record.note("Procrastinate, Chancy and the bare loop in our tables are left out: quick")
    elif python := peers_python():
        for name in ("Procrastinate", "Chancy"):
            package = name.lower()
            record.versions[package] = version_of(python, package)
            command = [str(python), "-m", f"bench.peers.{package}_noop"]
            found.append(Peer(name, command, is_work_left=""))
    return found


def pauses(submissions: int) -> list[float]:
    """The same for every loop: 20 to 50 ms between two submissions."""
    chosen = random.Random(1)  # noqa: S311
    return [chosen.uniform(*PAUSE_SECONDS) for _ in range(submissions)]


def pickup_ms(conn: db.Connection, submissions: int = SUBMISSIONS) -> list[float]:
    """What a worker that waits for work takes to begin each task, in milliseconds."""
    committed = {}
    for pause in pauses(submissions):
        time.sleep(pause)
        task_id = submit_noop(conn)
        committed[task_id] = time.monotonic_ns()
    started = await_starts(conn, list(committed))
    return [(started[task_id] - at) / 1e6 for task_id, at in committed.items()]


def submit_noop(conn: db.Connection) -> int:
    return db.submit_task(conn, noop_task()).task_id


# --- peers -----------------------------------------------------------------------------------


class PeerWorker:
    """A worker of a peer that waits for work, and its client."""

    def __init__(self, stage: Stage, peer: Peer) -> None:
        self.peer, self._stage = peer, stage
        self._gate = stage.folder / f"gate-{peer.name}"
        self._gate.mkdir()
        self._env = {
            **peer.env,
            "DATABASE_URL": stage.database("template0"),
            "BENCH_GATE": str(self._gate),
            "BENCH_EACH": "yes",
            "PYTHONPATH": str(ROOT),
        }
        self._run("install")
        stage.process([*peer.command, "work"], self._env)
        eventually(lambda: list(self._gate.glob("ready.*")), what=f"{peer.name} is ready")
        (self._gate / "go").touch()
        self._submit(pauses(WARM_UP))

    def pickup_ms(self, submissions: int) -> list[float]:
        started, committed = self._submit(pauses(submissions))
        return [(started[number] - at) / 1e6 for number, at in committed.items()]

    def _submit(self, wanted: list[float]) -> tuple[dict[int, int], dict[int, int]]:
        """When the worker began each of these jobs, and when its submission had returned."""
        for path in self._gate.glob("submitted.*"):
            path.unlink()
        for path in self._gate.glob("start.*"):
            path.write_text("")  # the worker goes on to write there
        (self._gate / gate.PAUSES).write_text(json.dumps(wanted))
        self._run("submit")
        eventually(lambda: len(noted(self._gate, "start")) == len(wanted), what=self.peer.name)
        return noted(self._gate, "start"), noted(self._gate, "submitted")

    def _run(self, word: str) -> None:
        program = self._stage.process([*self.peer.command, word], self._env)
        if program.wait(120) != 0:
            raise MeasureFailed(f"{self.peer.name} {word}: {program.log[-2000:]}")


def noted(folder: Path, which: str) -> dict[int, int]:
    """Instants by the number of the job, of lines that are whole."""
    lines = [
        line.split()
        for path in folder.glob(f"{which}.*")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return {int(number): int(instant) for number, instant in lines}


# --- the bare loops --------------------------------------------------------------------------


def submit_bare(cursor: Any) -> int:
    cursor.execute(BARE_SUBMIT, (PAYLOAD,))
    ((task_id, _),) = cursor.fetchall()
    return int(task_id)


@dataclass(frozen=True)
class BareLoop:
    """A process that listens on a channel, and claims with a statement that tells numbers first."""

    url: str
    channel: str
    claim: str
    submit: Callable[[], int]  # returns the number when the task is committed
    prepare: str = ""

    def pickup_ms(self, submissions: int) -> list[float]:
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        told = (self.url, f"{self.prepare}; LISTEN {self.channel}", self.claim, there, submissions)
        listener = spawn.Process(target=listen_and_claim, args=told, daemon=True)
        listener.start()
        here.recv()  # it listens
        committed = {}
        for pause in pauses(submissions):
            time.sleep(pause)
            task_id = self.submit()
            committed[task_id] = time.monotonic_ns()
        started = here.recv()
        listener.join()
        return [(started[task_id] - at) / 1e6 for task_id, at in committed.items()]


def listen_and_claim(url: str, listen: str, claim: str, pipe: Pipe, submissions: int) -> None:
    """Claim at each notification until all are claimed; then tell when each was."""
    conn = psycopg2.connect(url)
    conn.autocommit = True
    started: dict[int, int] = {}
    with conn.cursor() as cursor:
        cursor.execute(listen)
        pipe.send(None)
        while len(started) < submissions:
            select.select([conn], [], [])
            conn.poll()
            while conn.notifies:
                conn.notifies.clear()
                cursor.execute(claim)
                claimed = cursor.fetchall()
                now = time.monotonic_ns()
                started.update((task_id, now) for task_id, _ in claimed)
    pipe.send(started)
    conn.close()


if __name__ == "__main__":
    run("pickup", "Pickup: from commit to start of the work", measure, "--quick" in sys.argv)
