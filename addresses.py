"""Which addresses a call on a tenant's behalf may go to: public ones, judged as addresses.

Names and spellings are judged by nobody: `0x7f.1`, `2130706433` and a name of the tenant's own all
end as an address, and that is what is looked at, and dialled.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

import httpx

HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]+")

LOOPBACK = "loopback"

# https://www.iana.org/assignments/iana-ipv4-special-registry: all that is not of the public
# internet. Written out, because ipaddress.is_global and is_private differ from it, and between
# versions of Python.
NOT_PUBLIC_V4 = {
    "0.0.0.0/8": "this host",
    "10.0.0.0/8": "private",
    "100.64.0.0/10": "shared by a carrier",
    "127.0.0.0/8": LOOPBACK,
    "169.254.0.0/16": "link-local",
    "172.16.0.0/12": "private",
    "192.0.0.0/24": "reserved for protocols",
    "192.0.2.0/24": "for documentation",
    "192.88.99.0/24": "a 6to4 relay",
    "192.168.0.0/16": "private",
    "198.18.0.0/15": "for benchmarks",
    "198.51.100.0/24": "for documentation",
    "203.0.113.0/24": "for documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
}
# Of IPv6 only this much is public at all; loopback, link-local, IPv4-mapped and -compatible,
# NAT64, unique local and multicast addresses are outside of it.
PUBLIC_V6 = "2000::/3"
NOT_PUBLIC_V6 = {
    "2001::/23": "reserved for protocols, Teredo among them",
    "2001:db8::/32": "for documentation",
    "2002::/16": "6to4",
    "3fff::/20": "for documentation",
}

_V4 = {ipaddress.IPv4Network(network): what for network, what in NOT_PUBLIC_V4.items()}
_V6 = {ipaddress.IPv6Network(network): what for network, what in NOT_PUBLIC_V6.items()}
_PUBLIC_V6 = ipaddress.IPv6Network(PUBLIC_V6)


def why_not_public(address: str) -> str | None:
    """What kind of address this is if nobody may be sent there; None if it is a public one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return "no address"
    if isinstance(ip, ipaddress.IPv4Address):
        return next((what for network, what in _V4.items() if ip in network), None)
    if ip.scope_id is not None or ip not in _PUBLIC_V6:
        return "not of the public internet"
    return next((what for network, what in _V6.items() if ip in network), None)


def is_loopback(address: str) -> bool:
    """Whether it is this machine itself, written without detours."""
    return address == "::1" or why_not_public(address) == LOOPBACK


def web_url(text: str, base: httpx.URL | None = None) -> httpx.URL:
    """An http(s) URL that can be called; ValueError says why this one is none."""
    try:
        url = base.join(text) if base else httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as refused:
        raise ValueError(f"this is no URL: {refused}") from refused
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("the URL is to begin with http:// or https:// and a host")
    host = url.raw_host.decode("ascii", errors="replace")
    if not HOST.fullmatch(host) or not 0 < (80 if url.port is None else url.port) <= 65_535:
        raise ValueError("the URL's host or port is none")
    if url.userinfo:
        raise ValueError("a URL with a name and password is not used: they would be on record")
    return url


def plain_addresses(url: httpx.URL) -> list[str]:
    """What can be seen of a URL's addresses without asking a name server: nothing of most names."""
    host = url.raw_host.decode("ascii").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return ["127.0.0.1"]
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return [str(entry[4][0]) for entry in found]
    return []
