"""Reads what Postgres says it does for a statement: EXPLAIN (ANALYZE, BUFFERS), rolled back.

Of a function that it calls, auto_explain tells the same: each statement in it as a plan of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import db
from db import Connection

# Tables that grow with the work; next month's partition of the audit log is empty.
OF_JOBS = ("checkpoints", "checkpoint_blobs", "checkpoint_writes", "job_states", "model_calls")
GROWS = ("tasks", "audit_log", "tenant_tokens", *OF_JOBS)


@dataclass(frozen=True)
class Plan:
    """What was done, node by node, and how many pages of 8 kB were touched."""

    nodes: list[dict[str, Any]]
    pages: int
    text: str = ""  # of a statement inside a function

    def is_of_a_trigger(self) -> bool:
        """Whether it reads the tables of changed rows."""
        return any(node["Node Type"] == "Named Tuplestore Scan" for node in self.nodes)

    def scans_of_whole_tables(self) -> list[str]:
        return [
            f"{node['Relation Name']}: {rows_read(node)} rows"
            for node in self.nodes
            if node["Node Type"] == "Seq Scan"
            and node["Relation Name"].startswith(GROWS)
            and rows_read(node) > 0
        ]

    def most_rows_sorted(self) -> int:
        """By one sort, counted before any LIMIT."""
        sorts = (node for node in self.nodes if node["Node Type"].endswith("Sort"))
        return max((rows_read(below) for sort in sorts for below in sort["Plans"]), default=0)

    def most_rows_read(self) -> int:
        """By one scan of a table that grows, whether it passed them on or not."""
        return max(
            (rows_read(n) for n in self.nodes if n.get("Relation Name", "").startswith(GROWS)),
            default=0,
        )

    def most_rows_compared(self) -> int:
        """By one join, of pairs that did not belong together."""
        return max(
            (
                round(n.get("Rows Removed by Join Filter", 0) * n["Actual Loops"])
                for n in self.nodes
            ),
            default=0,
        )


def rows_read(node: Mapping[str, Any]) -> int:
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return round((node["Actual Rows"] + removed) * node["Actual Loops"])


def plan_of(conn: Connection, statement: str, values: Mapping[str, Any]) -> Plan:
    """Run the statement, with the functions that it calls; tell how it went, and roll it back."""
    with plans_inside_functions(conn) as inside, db.transaction(conn) as cursor:
        cursor.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, values)
        ((explained),) = (row["QUERY PLAN"][0]["Plan"] for row in cursor.fetchall())
        cursor.execute("ROLLBACK AND CHAIN")
    plan = _plan(explained)  # its pages are those of the functions as well
    more = (node for one in inside if not one.is_of_a_trigger() for node in one.nodes)
    return Plan([*plan.nodes, *more], plan.pages)


def _plan(explained: dict[str, Any], text: str = "") -> Plan:
    pages = explained["Shared Hit Blocks"] + explained["Shared Read Blocks"]
    return Plan(list(nodes(explained)), pages, text)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@contextlib.contextmanager
def plans_inside_functions(conn: Connection) -> Iterator[list[Plan]]:
    """The plans of what functions ran in the block, filled in at its end."""
    settings = "log_min_duration = 0", "log_nested_statements = on", "log_analyze = on"
    more = "log_buffers = on", "log_format = json"
    db.fetch(conn, "LOAD 'auto_explain'")
    for setting in (*settings, *more):
        db.fetch(conn, f"SET auto_explain.{setting}")
    db.fetch(conn, "SET client_min_messages = log")
    found: list[Plan] = []
    usual, conn.notices = conn.notices, []  # without a limit
    yield found
    db.fetch(conn, "RESET client_min_messages")
    notices, conn.notices = conn.notices, usual
    for notice in notices:
        if "plan:\n" in notice:
            told = json.loads(notice.split("plan:\n", 1)[1])
            found.append(_plan(told["Plan"], told["Query Text"]))
