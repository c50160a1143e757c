"""Chancy on psycopg 3: its executor for coroutines with 300 jobs at a time, eager polling, uvloop.

What has become of jobs is written every 50 ms, not every second as by default.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import uvloop
from chancy import Chancy, Queue, Worker, job

from bench.peers import gate

CONCURRENCY = 300
WRITE_SECONDS = 0.05
PAD = "x" * 176
QUEUE = Queue(
    "default",
    concurrency=CONCURRENCY,
    polling_interval=1,
    eager_polling=True,
    executor="chancy.executors.asyncex.AsyncExecutor",
)

begin: Callable[[int], None] = gate.FirstJob().begin


@job(queue="default")  # type: ignore[untyped-decorator]
async def noop(seq: int, pad: str) -> None:
    begin(seq)


def chancy() -> Chancy:
    return Chancy(os.environ["DATABASE_URL"])


async def install() -> None:
    async with chancy() as queues:
        await queues.migrate()
        await queues.declare(QUEUE, upsert=True)


async def work() -> None:
    global begin
    begin = gate.at_begin()
    async with chancy() as queues:
        worker = Worker(queues)
        worker.send_outgoing_interval = WRITE_SECONDS
        gate.wait()
        async with worker:
            await worker.wait_for_shutdown()


async def submit() -> None:
    submitted = gate.Instants("submitted")
    async with chancy() as queues:
        for number in gate.paused_numbers():
            await queues.push(noop.job.with_kwargs(seq=number, pad=PAD))
            submitted.note(number)


def main() -> None:
    logging.disable(logging.INFO)
    uvloop.run({"install": install, "work": work, "submit": submit}[sys.argv[1]]())


if __name__ == "__main__":
    # Jobs are stored by the name of their module, which must not be __main__.
    from bench.peers import chancy_noop

    chancy_noop.main()
