"""Deciding what is used and what is started: the answer of a look around, changing nothing."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from local.ports import free_port, is_listening
from local.postgres import EmbeddedPostgres
from local.probes import answers_like_ollama, why_refused

DATABASE = "orchestrator"


@dataclass(frozen=True)
class Plan:
    """Use what is at `url`, or start our own on `port`; `because` says why, in plain words."""

    because: str
    url: str = ""
    port: int | None = None


def plan_database(
    chosen_url: str | None, last_url: str | None, embedded: EmbeddedPostgres, normal_port: int
) -> Plan:
    """A given address, our own server that still runs, one that takes our password, a new one."""
    if chosen_url is not None:
        return Plan("DATABASE_URL is set, so the Postgres it names is used.", url=chosen_url)
    if embedded.pid is not None:
        return Plan("The embedded one still runs from last time.", port=embedded.port)
    if not is_listening(normal_port):
        return Plan(
            f"Nothing on port {normal_port}, so the embedded one is started.", port=normal_port
        )
    password = quote(embedded.password, safe="")
    url = f"postgresql://postgres:{password}@localhost:{normal_port}/"
    refused = why_refused(f"{url}postgres")
    if refused is None:
        return Plan(
            f"One on port {normal_port} takes our password, so it is used.", url=f"{url}{DATABASE}"
        )
    port = _port_beside(last_url)
    return Plan(
        f"Port {normal_port} is taken by something that does not let us in with DB_PASSWORD "
        f"({refused.splitlines()[-1].strip()}), so the embedded one is started on port {port}.",
        port=port,
    )


def plan_model(chosen_url: str | None, last_url: str | None, normal_port: int) -> Plan:
    """A given address, whatever speaks Ollama's API on the usual port, or our stand-in."""
    if chosen_url is not None:
        return Plan("An address is set for it, so that one is used.", url=chosen_url)
    url = f"http://localhost:{normal_port}"
    if answers_like_ollama(url):
        return Plan(f"An Ollama answers on port {normal_port}, so it is used.", url=url)
    if not is_listening(normal_port):
        return Plan(
            f"No Ollama on port {normal_port}, so a small stand-in is started.", port=normal_port
        )
    port = _port_beside(last_url)
    return Plan(
        f"Port {normal_port} is taken by something that is no Ollama, so a small stand-in is "
        f"started on port {port}.",
        port=port,
    )


def plan_api(normal_port: int) -> Plan:
    """The usual port, or a free one."""
    if not is_listening(normal_port):
        return Plan(f"Starting it on port {normal_port}.", port=normal_port)
    port = free_port()
    return Plan(f"Port {normal_port} is taken, so it is started on port {port}.", port=port)


def _port_beside(last_url: str | None) -> int:
    """The port run.sh chose last time, if it is still free, or another."""
    last = urlsplit(last_url).port if last_url else None
    return last if last is not None and not is_listening(last) else free_port()
