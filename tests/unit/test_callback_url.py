"""callback_url at the POST: what is refused by its text alone, and what is left to the delivery."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from api.callbacks import LONGEST_URL, why_refused
from queries.webhooks import Sender

NO_KEYS = Sender(None, keys_exist=False, at_seconds=0)
KEYS = Sender(b"s" * 32, keys_exist=True, at_seconds=0)

LOOPBACK = [
    "127.0.0.1", "127.1", "0x7f.1", "0X7F.0.0.1", "2130706433", "017700000001", "127.255.255.254",
    "localhost", "LOCALHOST", "localhost.", "a.localhost", "a.b.LocalHost.", "[::1]",
    "127\u30020\u30020\u30021",
]  # fmt: skip
PRIVATE = [
    "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0", "0.0.0.0",
    "0xa9fea9fe", "224.0.0.1", "255.255.255.255", "[::]", "[::ffff:127.0.0.1]",
    "[::ffff:10.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]",
    "[fc00::1]", "[fd00::1]", "[ff02::1]", "[2001:db8::1]",
]  # fmt: skip
FULL_WIDTH = ["\uff10x7f.1", "\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1"]


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is a number already may be asked for."""
    real = socket.getaddrinfo

    def numbers_only(*args: Any, flags: int = 0, **more: Any) -> Any:
        assert flags & socket.AI_NUMERICHOST, f"a name was looked up: {args}"
        return real(*args, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", numbers_only)


@pytest.mark.parametrize("host", [*LOOPBACK, *PRIVATE])
@pytest.mark.parametrize("form", ["http://{}/", "https://{}:8443/a?b=c#d", "HTTP://{}"])
def test_an_address_that_is_plainly_not_public_is_refused_and_the_setting_named(
    host: str, form: str
) -> None:
    refused = why_refused(form.format(host), KEYS, allow_private=False)
    assert refused
    assert "not public" in refused
    assert "callbacks.allow_private_addresses" in refused
    assert why_refused(form.format(host), KEYS, allow_private=True) is None


@pytest.mark.parametrize("host", LOOPBACK)
def test_while_there_is_no_key_this_machine_itself_may_be_called(host: str) -> None:
    assert why_refused(f"http://{host}:8000/", NO_KEYS, allow_private=False) is None


@pytest.mark.parametrize("host", PRIVATE)
def test_while_there_is_no_key_nothing_else_that_is_private_may_be_called(host: str) -> None:
    assert "not public" in str(why_refused(f"http://{host}/", NO_KEYS, allow_private=False))


@pytest.mark.parametrize("host", FULL_WIDTH)
def test_digits_of_another_script_are_refused_one_way_or_the_other(host: str) -> None:
    for sender in (KEYS, NO_KEYS):
        assert why_refused(f"http://{host}/", sender, allow_private=False)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/a?b=c", "http://hooks.example.com:8080", "https://8.8.8.8/",
        "https://[2606:4700::1111]/", "https://b\u00fccher.example/", "https://localhost.example/",
        "https://notlocalhost/", "https://internal/", "https://127.0.0.1.example/",
    ],
)  # fmt: skip
def test_where_a_name_leads_is_not_asked_at_the_post(url: str) -> None:
    assert why_refused(url, KEYS, allow_private=False) is None


@pytest.mark.parametrize(
    "url",
    [
        "", "hooks", "/hooks", "//hooks.example/", "ftp://a.example/", "file:///etc/passwd",
        "gopher://a/", "javascript:1", "http://", "http:///a", "http://a b/", "http://[::/",
        "http://a:99999/", "http://a:0/", "http://%31%32%37.0.0.1/", "http://a.example\\@b/", "ws://a.example/",
        "http://a.example/\n", "mailto:a@b.example",
    ],
)  # fmt: skip
def test_what_is_no_web_address_is_refused(url: str) -> None:
    for allow_private in (False, True):
        assert why_refused(url, NO_KEYS, allow_private)


@pytest.mark.parametrize("who", ["user:word@", "user@", ":word@"])
def test_a_name_and_password_in_it_are_refused(who: str) -> None:
    assert "on record" in str(why_refused(f"https://{who}a.example/", KEYS, allow_private=True))


def test_its_length_has_a_limit() -> None:
    url = "https://a.example/".ljust(LONGEST_URL, "x")
    assert why_refused(url, KEYS, allow_private=False) is None
    assert "2000 characters" in str(why_refused(url + "x", KEYS, allow_private=False))
