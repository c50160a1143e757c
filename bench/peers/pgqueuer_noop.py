"""PgQueuer on asyncpg: batches of 250, uvloop, durable tables (its default), bulk by enqueue.

Batches of 10, 50, 100 and 1,000 and a pool of connections were slower. A job that is done moves
from its table of the queue to its log.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from bench.peers import gate

BATCH = 250
PAD = "x" * 176


async def driver() -> Any:
    return AsyncpgDriver(await asyncpg.connect(os.environ["DATABASE_URL"]))


async def install() -> None:
    await Queries(await driver()).install()


async def fill(jobs: int) -> None:
    queries = Queries(await driver())
    for first in range(0, jobs, 1000):
        numbers = range(first, min(first + 1000, jobs))
        payloads = [json.dumps({"seq": number, "pad": PAD}).encode() for number in numbers]
        await queries.enqueue(["noop"] * len(numbers), payloads, [0] * len(numbers))


async def work() -> None:
    queue, begin = PgQueuer(await driver()), gate.at_begin()

    async def noop(job: Any) -> None:
        begin(json.loads(job.payload)["seq"])

    queue.entrypoint("noop")(noop)
    gate.wait()
    await queue.run(batch_size=BATCH)


async def submit() -> None:
    queries, submitted = Queries(await driver()), gate.Instants("submitted")
    for number in gate.paused_numbers():
        await queries.enqueue("noop", json.dumps({"seq": number, "pad": PAD}).encode())
        submitted.note(number)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        uvloop.run(fill(int(sys.argv[2])))
    else:
        uvloop.run({"install": install, "work": work, "submit": submit}[sys.argv[1]]())
