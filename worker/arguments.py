"""The command line of a worker."""

from __future__ import annotations

import argparse
import os
import re
import socket

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


def default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One worker of Agent Orchestrator.")
    parser.add_argument("--concurrency", type=_at_least_one, help="tasks it runs at a time")
    parser.add_argument("--drain", action="store_true", help="exit when no work is left")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--name", type=_name, help="how it appears in logs and in a task's `worker`"
    )
    return parser.parse_args()


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("this is to be 1 to 100 of A-Z a-z 0-9 _ . : -")
    return text


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("this is to be a whole number, 1 or more")
    return int(text)
