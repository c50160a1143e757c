"""Procrastinate on psycopg 3: 20 jobs at a time, a pool of 10 connections, LISTEN, uvloop.

Concurrencies from 5 to 50 made little difference, and deleting the jobs that are done none.
"""

from __future__ import annotations

import os
import sys

import procrastinate
import uvloop

from bench.peers import gate

CONCURRENCY = 20
CONNECTIONS = 10
PAD = "x" * 176

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(
        conninfo=os.environ["DATABASE_URL"], min_size=2, max_size=CONNECTIONS
    )
)


async def install() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def work() -> None:
    begin = gate.at_begin()

    async def noop(seq: int, pad: str) -> None:
        begin(seq)

    app.task(name="noop", queue="default")(noop)
    async with app.open_async():
        gate.wait()
        await app.run_worker_async(concurrency=CONCURRENCY, listen_notify=True)


async def submit() -> None:
    submitted = gate.Instants("submitted")
    task = app.configure_task("noop", queue="default")
    async with app.open_async():
        for number in gate.paused_numbers():
            await task.defer_async(seq=number, pad=PAD)
            submitted.note(number)


if __name__ == "__main__":
    uvloop.run({"install": install, "work": work, "submit": submit}[sys.argv[1]]())
