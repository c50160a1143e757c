"""One HTTP call on a tenant's behalf, to an address that was judged.

The name is looked up once, every address it has is judged, and exactly one that was judged is
dialled, under the name: in the Host header and in TLS. No redirect is followed. Nothing of the
environment is used: no proxy, no netrc.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx

import addresses
from execution.certificates import trusted
from execution.errors import Failure, Permanent
from execution.tools.threads import in_thread

T = TypeVar("T")

MOST_ADDRESSES_TRIED = 3


@dataclass(frozen=True)
class Leave:
    """Which addresses may be called beside public ones, and the setting that lets all of them."""

    private: bool
    setting: str
    loopback: bool = False

    def judge(self, address: str) -> str | None:
        """What kind of address this is if it may not be called."""
        if self.private or (self.loopback and addresses.is_loopback(address)):
            return None
        return addresses.why_not_public(address)


@dataclass(frozen=True)
class Call:
    """What is sent."""

    method: str
    url: httpx.URL
    headers: Mapping[str, str]
    content: bytes | None = None


async def dial(
    call: Call,
    leave: Leave,
    timeout_seconds: float,
    read: Callable[[httpx.Response], Awaitable[T]],
) -> T:
    """What `read` makes of the answer, from the first address that takes calls.

    Failure if none does or the name leads nowhere, Permanent if it leads where it may not; an
    httpx.HTTPError once the call was taken. Each single wait ends after the timeout, all of them
    together when the caller says so.
    """
    url = call.url
    judged = await _judged_addresses(url, leave)
    tls = await certificates()
    unreachable: Exception = OSError("it has no address")
    timeout = httpx.Timeout(timeout_seconds, connect=timeout_seconds / 3)
    async with httpx.AsyncClient(
        verify=tls, timeout=timeout, trust_env=False, follow_redirects=False
    ) as client:
        for address in judged[:MOST_ADDRESSES_TRIED]:
            try:
                async with client.stream(
                    call.method,
                    url.copy_with(host=address, fragment=None),
                    headers={
                        "Host": url.netloc.decode("ascii"),
                        "User-Agent": "agent-orchestrator",
                        "Accept-Encoding": "identity",  # what is read is what is counted
                        **call.headers,
                    },
                    content=call.content,
                    extensions={"sni_hostname": url.raw_host.decode("ascii").rstrip(".")},
                ) as response:
                    return await read(response)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
                unreachable = failed  # nothing was sent
    raise Failure(f"{url.host} cannot be reached: {words(unreachable)}") from unreachable


async def _judged_addresses(url: httpx.URL, leave: Leave) -> list[str]:
    """All addresses of the host, if each of them may be called."""
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await _resolve(url.raw_host.decode("ascii"), port)
    except (OSError, UnicodeError) as failed:
        raise Failure(f"the name {url.host[:300]} leads nowhere: {failed}") from failed
    for address in found:
        if what := leave.judge(address):
            # The address itself stays with us: it would tell about the inside of a network.
            raise Permanent(
                f"{url.host[:300]} leads to an address that is not public ({what}); "
                f"{leave.setting} lets such calls through"
            )
    return found


async def _resolve(host: str, port: int) -> list[str]:
    """Every address of a name, in the order of preference; raises OSError, or UnicodeError.

    In a thread of its own: a name server that does not answer must not fill the few threads in
    which the event loop looks up names for everybody else.
    """
    found = await in_thread(
        f"look-up of {host[:80]}",
        lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
    )
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def words(failed: Exception) -> str:
    return f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__


async def certificates() -> ssl.SSLContext:
    """Not on the loop's thread: they may have to be read first."""
    return await in_thread("certificates", trusted)
