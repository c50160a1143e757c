"""The tool http_get: where it may go, where it really goes, and what it brings back."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

import addresses
from execution.errors import Failure, Permanent
from execution.tools import dial, http_get
from execution.tools.context import ToolContext
from tests.conftest import settings_for

NOT_PUBLIC = [
    # The traps: is_global says yes to the first four, is_private no to the fifth.
    "64:ff9b::7f00:1", "2002:7f00:1::", "::127.0.0.1", "224.0.0.1", "100.64.0.1",
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.127.255.255", "127.0.0.1",
    "127.255.255.254", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1",
    "192.0.0.170", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255",
    "198.51.100.7", "203.0.113.7", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "::8.8.8.8",
    "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:7f00:1::", "2001:2::1",
    "2001:10::1", "2001:20::1", "2001:db8::1", "2002::1", "2002:0808:0808::1", "3fff::1",
    "5f00::1", "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1",
    "ff0e::1", "2606:4700::1111%lo", "4000::1", "not an address", "",
]  # fmt: skip
PUBLIC = [
    "8.8.8.8", "1.1.1.1", "93.184.216.34", "100.63.255.255", "100.128.0.1", "172.15.0.1",
    "172.32.0.1", "192.0.1.1", "198.17.255.255", "198.20.0.1", "223.255.255.255",
    "2606:4700::1111", "2a00:1450:4001:81b::200e", "2001:4860:4860::8888", "2001:200::1",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_of_the_public_internet_is_refused(address: str) -> None:
    assert addresses.why_not_public(address) is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_let_through(address: str) -> None:
    assert addresses.why_not_public(address) is None


# --- a server --------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        server.seen.append((self.path, dict(self.headers)))
        status, headers, body = server.answers.get(self.path, (404, {}, b"no such page"))
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in [body] if isinstance(body, bytes) else body():
                self.wfile.write(piece)
        except OSError:  # the client has had enough
            server.hung_up.set()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, dict[str, str], bytes | Callable[[], Any]]] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.hung_up = threading.Event()
        self.port = int(self.server_address[1])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()


def get(url: str, **settings: Any) -> dict[str, Any]:
    values = {"allow_private_addresses": True, "timeout_seconds": 5, **settings}
    all_settings = settings_for("postgresql://nobody@nowhere/none", http_get=values)
    context = ToolContext("key", 1, 1, all_settings)
    return asyncio.run(http_get.http_get(url, context))


# --- where it goes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0x7f.1", "2130706433", "017700000001", "127.1", "[::1]",
        "[::ffff:127.0.0.1]", "0", "\uff10x7f.1", "\uff11\uff12\uff17.0.0.1", "169.254.169.254",
    ],
)  # fmt: skip
def test_no_spelling_of_a_private_address_is_called(server: Server, host: str) -> None:
    with pytest.raises((Permanent, Failure)) as refused:
        get(f"http://{host}:{server.port}/", allow_private_addresses=False)
    assert "not public" in str(refused.value) or "no URL" in str(refused.value)
    assert "127.0.0.1 " not in str(refused.value).replace("127.0.0.1 leads", "")
    assert server.seen == []


def test_a_name_with_one_private_address_among_public_ones_is_refused(
    server: Server, names: dict[str, list[list[str]]]
) -> None:
    names["mixed.example"] = [["93.184.216.34", "127.0.0.1"]]
    with pytest.raises(Permanent, match=r"mixed\.example leads to .* not public \(loopback\)"):
        get(f"http://mixed.example:{server.port}/", allow_private_addresses=False)
    assert server.seen == []


def test_a_name_that_leads_elsewhere_at_the_second_look_up_is_not_looked_up_again(
    server: Server, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judged address is dialled. The control shows the danger: a client that looks up anew."""
    server.answers["/"] = (200, {}, b"secret")
    names["rebound.example"] = [["93.184.216.34"], ["127.0.0.1"]]
    dialled: list[str] = []

    async def dial(self: Any, protocol: Any, host: Any, port: int, **more: Any) -> Any:
        dialled.append(str(host))
        raise OSError("no network here")

    url = f"http://rebound.example:{server.port}/"
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "sock_connect", dial, raising=False)
        patch.setattr(asyncio.BaseEventLoop, "create_connection", dial)
        with pytest.raises(Failure, match=r"rebound\.example cannot be reached"):
            get(url, allow_private_addresses=False)
    assert dialled == ["93.184.216.34"]
    assert names["rebound.example"] == [["127.0.0.1"]]  # one look-up was made
    assert server.seen == []
    with httpx.Client(trust_env=False) as careless:
        assert careless.get(url).text == "secret"


def test_the_host_header_is_the_name_and_the_address_is_the_judged_one(
    server: Server, names: dict[str, list[list[str]]]
) -> None:
    names["named.example"] = [["127.0.0.1"]]
    server.answers["/a?b=c"] = (200, {"Content-Type": "text/plain"}, b"hello")
    got = get(f"http://named.example:{server.port}/a?b=c#part")
    assert got["text"] == "hello"
    ((path, headers),) = server.seen
    assert path == "/a?b=c"
    assert headers["Host"] == f"named.example:{server.port}"


def test_the_next_address_is_tried_when_one_takes_no_calls(
    server: Server, names: dict[str, list[list[str]]]
) -> None:
    names["two.example"] = [["::1", "127.0.0.1"]]
    server.answers["/"] = (200, {}, b"here")
    assert get(f"http://two.example:{server.port}/")["text"] == "here"


def test_tls_asks_for_the_name_and_not_for_the_address(
    names: dict[str, list[list[str]]],
) -> None:
    names["secure.example"] = [["127.0.0.1"]]
    hello = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def take_hello() -> None:
            conn, _ = listener.accept()
            with conn:
                hello.extend(conn.recv(4096))

        thread = threading.Thread(target=take_hello, daemon=True)
        thread.start()
        with pytest.raises(Failure, match=r"secure\.example"):
            get(f"https://secure.example:{port}/")
        thread.join(5)
    assert b"secure.example" in hello


def test_certificates_are_checked() -> None:
    context = asyncio.run(dial.certificates())
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_no_proxy_of_the_environment_is_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    server.answers["/"] = (200, {}, b"direct")
    assert get(f"http://127.0.0.1:{server.port}/")["text"] == "direct"


@pytest.mark.parametrize(
    "url",
    ["ftp://a/", "file:///etc/passwd", "a", "", "http://", "//a/", "http://a b/", "http://[::/",
     "http://user:word@a/", "http://a:99999/", "gopher://a/", "http://\ud800/", "javascript:1",
     "http://a/" + "x" * 100_000],
)  # fmt: skip
def test_what_is_no_web_address_is_permanent(url: str) -> None:
    with pytest.raises(Permanent):
        get(url)


def test_a_name_that_leads_nowhere_is_tried_again() -> None:
    with pytest.raises(Failure, match="leads nowhere"):
        get("http://nowhere.invalid/")


# --- redirects -------------------------------------------------------------------------------


def test_redirects_are_followed_five_times_and_not_more(server: Server) -> None:
    for n in range(7):
        server.answers[f"/{n}"] = (302, {"Location": f"/{n + 1}"}, b"")
    server.answers["/7"] = (200, {}, b"there")
    assert get(f"http://127.0.0.1:{server.port}/2")["text"] == "there"
    with pytest.raises(Permanent, match="more than 5 redirects"):
        get(f"http://127.0.0.1:{server.port}/1")


def test_the_place_that_a_redirect_leads_to_is_judged(
    server: Server, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address passes as if it were public; where it leads to does not."""
    judge = addresses.why_not_public
    monkeypatch.setattr(
        addresses, "why_not_public", lambda one: None if one == "127.0.0.1" else judge(one)
    )
    names["inside.example"] = [["10.0.0.1"]]
    for target in (
        "http://inside.example/", "http://127.0.0.2/", "http://[::1]/", "//169.254.169.254/",
    ):  # fmt: skip
        server.answers["/"] = (307, {"Location": target}, b"")
        with pytest.raises(Permanent, match="not public"):
            get(f"http://127.0.0.1:{server.port}/", allow_private_addresses=False)
    for target in ("file:///etc/passwd", "ftp://a/"):
        server.answers["/"] = (301, {"Location": target}, b"")
        with pytest.raises(Permanent, match="http://"):
            get(f"http://127.0.0.1:{server.port}/", allow_private_addresses=False)


# --- what it brings back ---------------------------------------------------------------------


def test_the_result_has_status_some_headers_and_the_text(server: Server) -> None:
    server.answers["/"] = (
        203,
        {"Content-Type": "text/plain; charset=iso-8859-1", "ETag": '"1"', "Set-Cookie": "s=1"},
        "Gr\u00fc\u00dfe".encode("iso-8859-1"),
    )
    url = f"http://127.0.0.1:{server.port}/"
    assert get(url) == {
        "url": url,
        "status": 203,
        "headers": {"content-type": "text/plain; charset=iso-8859-1", "etag": '"1"'},
        "text": "Gr\u00fc\u00dfe",
        "truncated": False,
    }


@pytest.mark.parametrize("charset", ["punycode", "idna", "zip", "rot13", "no-such", "hex"])
def test_a_strange_charset_is_read_as_utf_8(server: Server, charset: str) -> None:
    server.answers["/"] = (200, {"Content-Type": f"text/plain; charset={charset}"}, b"\xffa" * 1000)
    assert get(f"http://127.0.0.1:{server.port}/")["text"] == "\ufffda" * 1000


def test_a_body_without_end_is_cut_and_hung_up_on(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 10_000

    server.answers["/"] = (200, {}, endless)
    got = get(f"http://127.0.0.1:{server.port}/", max_bytes=25_000)
    assert (got["truncated"], got["text"]) == (True, "x" * 25_000)
    assert server.hung_up.wait(5)


def test_what_is_packed_although_that_was_not_asked_for_is_not_unpacked(server: Server) -> None:
    server.answers["/"] = (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b")
    with pytest.raises(Permanent, match="compressed"):
        get(f"http://127.0.0.1:{server.port}/")
    assert server.seen[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599, 429, 408, 425])
def test_a_server_in_trouble_is_tried_again(server: Server, status: int) -> None:
    server.answers["/"] = (status, {}, b"")
    with pytest.raises(Failure, match=f"answered {status}"):
        get(f"http://127.0.0.1:{server.port}/")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
def test_a_page_that_is_not_to_be_had_is_permanent(server: Server, status: int) -> None:
    server.answers["/"] = (status, {}, b"")
    with pytest.raises(Permanent, match=f"answered {status}"):
        get(f"http://127.0.0.1:{server.port}/")


def test_a_server_that_is_slow_is_given_up_in_time_and_tried_again(server: Server) -> None:
    def trickle() -> Iterator[bytes]:
        while True:
            yield b"x"
            time.sleep(0.05)

    server.answers["/"] = (200, {}, trickle)
    begun = time.monotonic()
    with pytest.raises(Failure, match=r"no answer within 0\.3 s"):
        get(f"http://127.0.0.1:{server.port}/", timeout_seconds=0.3)
    assert time.monotonic() - begun < 10


def test_a_look_up_that_takes_for_ever_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: let_go.wait(60))
    begun = time.monotonic()
    with pytest.raises(Failure, match="no answer within"):
        get("http://slow.example/", timeout_seconds=0.2)
    assert time.monotonic() - begun < 10
    let_go.set()


def test_nobody_there_and_garbage_are_tried_again(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Failure, match="cannot be reached"):
        get(f"http://127.0.0.1:{port}/")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk_nonsense() -> None:
            conn, _ = listener.accept()
            with conn:
                conn.recv(4096)
                conn.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=talk_nonsense, daemon=True).start()
        with pytest.raises(Failure):
            get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
