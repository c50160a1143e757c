"""The chaos test behind chaos.sh; exits non-zero when the database shows one thing gone wrong."""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psycopg2.extensions

from local.chaos_plan import Blow, Plan, PlannedRun, make_plan
from local.chaos_proof import ALWAYS, AT_THE_END, Answer, Caps, ask, compare
from local.chaos_report import Figures, progress, report
from local.chaos_stage import LEASE_SECONDS, Stage
from local.demo import DemoFailed, DemoStopped, clear_line, stop
from local.output import say

LOOK_EVERY_SECONDS = 0.1
TELL_EVERY_SECONDS = 0.5
TELL_A_LOG_EVERY_SECONDS = 5.0
RUNS_PER_SECOND = 1.5
MAX_RETRY = 3
MAX_DELIVERY = 20  # what dies here dies of its own fault, and not of bad luck
Connection = psycopg2.extensions.connection
Sabotage = Callable[[Connection], None]


class Chaos:
    """Goes round: submits what is due, deals out blows, decides approvals, until all has ended."""

    def __init__(
        self, stage: Stage, plan: Plan, caps: Caps, seconds: float, patience_seconds: float
    ) -> None:
        self.stage = stage
        self.caps = caps
        self.figures = Figures()
        self.submitted: dict[int, PlannedRun] = {}
        self.cancelled: set[int] = set()
        self._seconds = seconds
        self._patience_seconds = patience_seconds
        self._runs = list(plan.runs)
        self._blows = list(plan.blows)
        self._thaws: list[tuple[float, int]] = []
        self._cancels: list[tuple[float, int]] = []
        self._fate_of: dict[int, str] = {}  # of the steps, by their numbers
        self._requeued: set[int] = set()
        self._told = 0.0
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def run(self) -> None:
        """Until the time is over and every run has ended; DemoFailed if that does not come."""
        while self.elapsed < self._seconds or self._runs or self.stage.unended():
            if self.elapsed > self._seconds + self._patience_seconds:
                clear_line()
                raise DemoFailed(self._what_hangs())
            stop.pause(LOOK_EVERY_SECONDS)
            self._submit()
            self._strike()
            self._act_as_people()
            self.stage.replace_the_dead()
            self._tell()
        clear_line()
        self.stage.thaw_all()
        self.stage.stop_workers()

    def _submit(self) -> None:
        while self._runs and self._runs[0].at_seconds <= self.elapsed:
            run = self._runs.pop(0)
            run_id, numbers = self.stage.submit(run)
            self.submitted[run_id] = run
            self._fate_of |= {numbers[step.name]: step.fate for step in run.steps}
            if run.cancel_after_seconds is not None:
                self._cancels.append((self.elapsed + run.cancel_after_seconds, run_id))

    def _strike(self) -> None:
        for at_seconds, place in self._thaws:
            if at_seconds <= self.elapsed:
                self.stage.thaw(place)
        self._thaws = [thaw for thaw in self._thaws if thaw[0] > self.elapsed]
        while self._blows and self._blows[0].at_seconds <= self.elapsed:
            self._deal(self._blows.pop(0))

    def _deal(self, blow: Blow) -> None:
        if blow.frozen_seconds is None:
            self._thaws = [thaw for thaw in self._thaws if thaw[1] != blow.place]
            self.stage.kill(blow.place)
            self.figures.kills += 1
        elif self.stage.freeze(blow.place):
            self._thaws.append((self.elapsed + blow.frozen_seconds, blow.place))
            self.figures.freezes += 1

    def _act_as_people(self) -> None:
        """Approve, reject and cancel as planned; give some dead letters a new life."""
        for task_id in self.stage.awaiting_approval():
            self.stage.decide(task_id, self._fate_of[task_id] == "approved")
        for run_id in [run_id for at, run_id in self._cancels if at <= self.elapsed]:
            if self.stage.cancel(run_id):
                self.cancelled.add(run_id)
        self._cancels = [cancel for cancel in self._cancels if cancel[0] > self.elapsed]
        for task_id in set(self.stage.dead_letters()) - self._requeued:
            self._requeued.add(task_id)
            if task_id % 2 and self.elapsed < self._seconds:
                self.figures.requeues += self.stage.requeue(task_id)

    def _tell(self) -> None:
        every = TELL_EVERY_SECONDS if sys.stdout.isatty() else TELL_A_LOG_EVERY_SECONDS
        if time.monotonic() < self._told + every:
            return
        self._told = time.monotonic()
        line = progress(self.elapsed, self.figures, self.stage.counts(), len(self._runs))
        if sys.stdout.isatty():
            clear_line()
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            say(line)

    def _what_hangs(self) -> str:
        (unended,) = ask(self.stage.conn, AT_THE_END[:1], self.caps)
        rows = "\n".join(f"  {row}" for row in unended.at_fault[:20])
        return f"{len(unended.at_fault)} rows have not ended in time:\n{rows}"


def prove(chaos: Chaos) -> list[Answer]:
    """Every question, asked of the database."""
    return [
        *ask(chaos.stage.conn, AT_THE_END + ALWAYS, chaos.caps),
        *compare(chaos.stage.conn, chaos.submitted, chaos.cancelled),
    ]


def play(options: argparse.Namespace, sabotage: Sabotage) -> int:
    plan = make_plan(options.seed, options.seconds, options.runs, options.workers, LEASE_SECONDS)
    say(
        f"Chaos with seed {options.seed}: {len(plan.runs)} runs, {options.workers} workers, "
        f"{len(plan.blows)} blows in {options.seconds:g} s."
    )
    caps = Caps(MAX_RETRY, options.max_delivery)
    with stage_for(options, caps) as stage:
        chaos = Chaos(stage, plan, caps, options.seconds, options.patience)
        chaos.run()
        sabotage(stage.conn)
        answers = prove(chaos)
        say(report(stage.conn, chaos.figures, stage.blows, answers))
    if any(answer.at_fault for answer in answers):
        say(f"\nThe chaos test failed. {again(options)}")
        return 1
    say("\nEvery run came to its right end, and everything this has started is gone.")
    return 0


def again(options: argparse.Namespace) -> str:
    return (
        f"Again with the same dice: ./chaos.sh --seed {options.seed} "
        f"--seconds {options.seconds:g} --runs {options.runs} --workers {options.workers} "
        f"--max-delivery {options.max_delivery}"
    )


@contextlib.contextmanager
def stage_for(options: argparse.Namespace, caps: Caps) -> Iterator[Stage]:
    with (
        tempfile.TemporaryDirectory(prefix="orchestrator-chaos-") as folder,
        contextlib.ExitStack() as stack,
    ):
        yield Stage(Path(folder), stack, caps, options.workers, options.server)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos.sh", description="Kill workers at random and prove that nothing was lost."
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long workers are killed")
    parser.add_argument("--seed", type=int, help="the same runs and blows as another time")
    parser.add_argument(
        "--runs", type=int, help="how many are submitted; usually three in two seconds"
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--max-delivery",
        type=int,
        default=MAX_DELIVERY,
        help="so many lost hand-outs make a dead letter; usually more than a step ever meets",
    )
    parser.add_argument("--patience", type=float, default=180, help="longest wait for the last end")
    parser.add_argument(
        "--server",
        help="address of a Postgres to make a new database on, postgresql://…/postgres; "
        "usually one is started for this alone",
    )
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    if options.runs is None:
        options.runs = max(1, round(RUNS_PER_SECOND * options.seconds))
    if min(options.seconds, options.runs, options.workers, options.max_delivery) <= 0:
        parser.error("numbers are to be more than nothing")
    return options


def main(arguments: Sequence[str] | None = None, sabotage: Sabotage = lambda conn: None) -> int:
    """0: all was proved; `sabotage` is called before that, by tests of the proof."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, stop.note)
    signal.signal(signal.SIGINT, stop.note)
    try:
        return play(options, sabotage)
    except (DemoFailed, httpx.HTTPError, psycopg2.Error) as failed:
        say(f"\nThe chaos test failed: {failed}")
        say(again(options))
        return 1
    except DemoStopped:
        say("\nStopped.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
