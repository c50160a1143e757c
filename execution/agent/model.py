"""The model as a job's nodes see it: each call is in the ledger before it is made, and its reply
after it, so that a node that runs again is given the replies it had got already."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, cast

from langgraph.config import get_config
from langgraph.constants import START
from langgraph.runtime import get_runtime

from config import Settings
from connection import Connection
from errors import BudgetRefused, DatabaseUnavailable, LeaseLost
from execution.agent.context import BudgetSpent, InvalidReply, JobContext, JobStopped
from execution.agent.prompts import for_repair
from execution.agent.signals import Signals
from execution.answers import InvalidAnswer, reader
from execution.backends.interface import Backend, Completion
from execution.errors import EmptyAnswer, Failure, Outage, Permanent
from execution.text import storable
from pool import Pool
from queries.leases import ClaimedTask
from queries.model_calls import CallKey, CallReplied, end_call, release_call, reserve_call

T = TypeVar("T")
Which = Literal["token_budget", "tenant_tokens_per_day"]
OnText = Callable[[str, str], None]  # a node's name, a piece of what its model says

FRAME_TOKENS = 64
INSIDE = "|"  # in the name of a run, between that of a node and that of one in its graph
LEDGER_AWAY_SECONDS = 0.2


class Frames:
    """What each route's server puts around prompts: some tokens, until it is seen to put more.

    One object for a process, whose routes have one model each; may be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most: dict[str, int] = {}
        self._longest: dict[str, int] = {}

    def most_tokens(self, route: str, sent_bytes: int, num_ctx: int | None) -> int:
        """No prompt of so many bytes has more, as far as is known: each token has a byte at least,
        and a server keeps to `num_ctx`, if that was asked for, unless it was seen not to."""
        with self._lock:
            most = sent_bytes + self._most.get(route, FRAME_TOKENS)
            return most if num_ctx is None else min(most, max(num_ctx, self._longest.get(route, 0)))

    def learn(self, route: str, sent_bytes: int, prompt_tokens: int) -> None:
        """A prompt of so many bytes was counted as so many tokens."""
        with self._lock:
            known = self._most.get(route, FRAME_TOKENS)
            self._most[route] = max(known, prompt_tokens - sent_bytes)
            self._longest[route] = max(self._longest.get(route, 0), prompt_tokens)


class Calls:
    """The model calls of one attempt of a job; may be used from all threads of its nodes.

    `ended` is what ends the attempt, if a call has found that out.
    """

    def __init__(
        self,
        task: ClaimedTask,
        route: str,
        backend: Backend,
        settings: Settings,
        ledger: Pool,
        loop: asyncio.AbstractEventLoop,
        signals: Signals,
        on_text: OnText,
        frames: Frames,
    ) -> None:
        self.model = settings.models.of_route(route)
        self.max_bytes = settings.limits.max_result_bytes
        self.truncated = False
        self.ended: Exception | None = None
        self._task = task
        self._route = route
        self._backend = backend
        self._settings = settings
        self._ledger = ledger
        self._loop = loop
        self._signals = signals
        self._on_text = on_text
        self._frames = frames
        self._lock = threading.Lock()
        self._ordinals: Counter[tuple[object, ...]] = Counter()

    def check(self) -> None:
        """Raise JobStopped if the attempt is to end."""
        if self._signals.is_stopped or self.ended is not None:
            raise JobStopped

    def reply(self, prompt: str, schema: Mapping[str, Any] | None = None) -> str:
        """What the model says, now or when this node ran before."""
        self.check()
        key, prompt = self._next_key(), storable(prompt)
        sent_bytes = self._sent_bytes(prompt, schema)
        per_day = self._settings.limits.tenant_tokens_per_day
        budget = self._task.payload.get("token_budget")
        tokens = self._most_tokens(sent_bytes)
        try:
            reserved = self._in_ledger(
                lambda conn: reserve_call(conn, self._task, key, tokens, budget, per_day)
            )
        except BudgetRefused as refused:
            raise BudgetSpent(cast(Which, refused.which)) from refused
        if isinstance(reserved, CallReplied):
            return reserved.reply
        answer = self._paid_answer(reserved.call_id, key.node, prompt, schema)
        self._frames.learn(self._route, sent_bytes, answer.prompt_tokens)
        self.truncated = self.truncated or answer.truncated
        text = storable(answer.text)
        self._end(reserved.call_id, answer.prompt_tokens, answer.completion_tokens, text)
        return text

    def _next_key(self) -> CallKey:
        """Which call of its node this is. A node that LangGraph runs again counts from 0 again.

        LangGraph names the run of a node by the checkpoint in front of it, which is there after a
        crash. Only a branch from START runs before: it does so once, and goes by its own name.
        """
        config, run = get_config(), get_runtime().execution_info
        node = str(config["metadata"]["langgraph_node"])
        node_run = str(config["metadata"]["langgraph_checkpoint_ns"])
        if node == START and INSIDE not in node_run:
            node_run = START
        counter = (node_run, run and (run.node_first_attempt_time, run.node_attempt))
        with self._lock:
            ordinal = self._ordinals[counter]
            self._ordinals[counter] += 1
        return CallKey(node, node_run, ordinal)

    def _sent_bytes(self, prompt: str, schema: Mapping[str, Any] | None) -> int:
        """Of all that a server may put into the prompt: Ollama puts no schema there."""
        size = len(prompt.encode())
        return size if schema is None or self._is_ollama else size + len(str(schema).encode())

    def _most_tokens(self, sent_bytes: int) -> int:
        """What to reserve. The call uses no more, if its server puts no more around a prompt than
        it did so far, and ends an answer where it is asked to."""
        num_ctx = self._settings.ollama.num_ctx if self._is_ollama else None
        most = self._frames.most_tokens(self._route, sent_bytes, num_ctx)
        return most + self._settings.ollama.num_predict

    @property
    def _is_ollama(self) -> bool:
        return self._settings.backends.of_route(self._route).api == "ollama"

    def _paid_answer(
        self, call_id: int, node: str, prompt: str, schema: Mapping[str, Any] | None
    ) -> Completion:
        """Also an empty one. A call that brings none is ended in the ledger as far as it is known
        what it has used: else it keeps what was reserved for it."""
        try:
            return self._complete(node, prompt, schema)
        except EmptyAnswer as empty:
            return Completion("", empty.prompt_tokens, empty.completion_tokens, truncated=False)
        except Outage as away:
            if not away.hung_up:  # it did not take the call
                self._release(call_id)
            self._leave(away)
        except Permanent as ended:
            if ended.refused:
                self._release(call_id)
            raise
        except Failure as failed:
            if failed.prompt_tokens + failed.completion_tokens:
                self._end(call_id, failed.prompt_tokens, failed.completion_tokens, None)
            raise Failure(str(failed)) from failed  # its tokens are in the ledger

    def _release(self, call_id: int) -> None:
        self._in_ledger(lambda conn: release_call(conn, self._task, call_id))

    def _complete(self, node: str, prompt: str, schema: Mapping[str, Any] | None) -> Completion:
        """Ask the server, on the runner's loop; raises JobStopped when the job is stopped."""
        on_piece = partial(self._on_text, node)
        asking = self._backend.complete(self.model, prompt, on_piece, schema)
        call = asyncio.run_coroutine_threadsafe(asking, self._loop)
        with self._signals.calling(call):
            try:
                return call.result()
            except concurrent.futures.CancelledError as cancelled:
                raise JobStopped from cancelled

    def _end(
        self, call_id: int, prompt_tokens: int, completion_tokens: int, reply: str | None
    ) -> None:
        """Write what a call has cost. It is over and paid: that is not forgotten because Postgres
        is away for a moment."""
        cost = self._settings.cost.of_call(self._route, prompt_tokens, completion_tokens)
        give_up = time.monotonic() + self._settings.worker.lease_seconds

        def write(conn: Connection) -> None:
            end_call(
                conn,
                self._task,
                call_id,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                cost=cost,
                route=self._route,
                model=self.model,
                reply=reply,
            )

        while True:
            try:
                with self._ledger.connection() as conn:
                    return write(conn)
            except LeaseLost as lost:
                self._leave(lost)
            except DatabaseUnavailable as away:
                if time.monotonic() >= give_up:
                    self._leave(away)
            self._signals.pause(LEDGER_AWAY_SECONDS)
            self.check()

    def _in_ledger(self, act: Callable[[Connection], T]) -> T:
        try:
            with self._ledger.connection() as conn:
                return act(conn)
        except (LeaseLost, DatabaseUnavailable) as ended:
            self._leave(ended)

    def _leave(self, ended: Exception) -> NoReturn:
        """Out of the graph, past whatever its nodes catch."""
        self.ended = self.ended or ended
        raise JobStopped from ended


@dataclass(frozen=True, eq=False)
class JobModel(JobContext):
    """A JobContext; see context.py."""

    calls: Calls = field(repr=False)

    def ask(self, prompt: str) -> str:
        return self.calls.reply(prompt)

    def ask_for(self, prompt: str, schema: Mapping[str, Any]) -> Any:
        read_answer = reader(schema, self.calls.max_bytes)

        def read(text: str) -> Any:
            return _fit_for_a_state(read_answer(text))

        text = self.calls.reply(prompt, schema)
        try:
            return read(text)
        except InvalidAnswer as complaint:
            text = self.calls.reply(for_repair(prompt, text, complaint), schema)
        try:
            return read(text)
        except InvalidAnswer as again:
            raise InvalidReply(f"the model's reply does not follow the schema: {again}") from again

    def check(self) -> None:
        self.calls.check()


def _fit_for_a_state(value: Any) -> Any:
    """The same value; InvalidAnswer if a checkpoint could not hold it: LangGraph saves 64 bits."""
    if isinstance(value, dict):
        for member in value.values():
            _fit_for_a_state(member)
    elif isinstance(value, list):
        for member in value:
            _fit_for_a_state(member)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidAnswer("a number in it is too large")
    return value
