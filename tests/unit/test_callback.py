"""Callbacks: where they may go, where they really go, what they bring, what an answer means."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from execution.callback import headers_of, run_callback
from execution.errors import Failure, Permanent
from queries.leases import ClaimedTask, Lease, Outcome
from queries.webhooks import Message, Sender
from tests.conftest import settings_for
from tests.support.receiver import Answer, Receiver, is_signed, receiving
from tests.unit.test_http_get import NOT_PUBLIC

BODY = json.dumps(
    {"task_id": 7, "id": 7, "result": {"text": "Gr\u00fc\u00dfe \U0001f989"}}
).encode()
SENDER = Sender(None, keys_exist=True, at_seconds=1_700_000_000)
NO_KEYS = replace(SENDER, keys_exist=False)
PRIVATE = {"allow_private_addresses": True}

Names = dict[str, list[list[str]]]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def callback(url: Any, sender: Sender = SENDER, task_id: int = 9) -> ClaimedTask:
    return ClaimedTask(
        Lease(task_id, "token"), task_id, "callback", {"task_id": 7, "url": url}, "none",
        None, 1, 1, 0, message=Message(BODY, sender),
    )  # fmt: skip


def deliver(task: ClaimedTask | str, **settings: Any) -> Outcome:
    values = {"timeout_seconds": 5, **settings}
    told = task if isinstance(task, ClaimedTask) else callback(task)
    return asyncio.run(run_callback(told, settings_for("postgresql://a@b/c", callbacks=values)))


# --- what is sent ----------------------------------------------------------------------------


def test_a_message_is_signed_as_in_the_example_of_standard_webhooks() -> None:
    """The id, time, secret and body of its reference libraries' tests."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    message = Message(b'{"test": 2432232314}', Sender(secret, True, 1614265330))
    headers = headers_of("msg_p5jXN8AQM9LWM0D4loKWxJek", message)
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_receiver_gets_the_body_its_type_and_headers_by_which_it_can_be_checked(
    receiver: Receiver,
) -> None:
    now = replace(SENDER, secret=b"k" * 32, at_seconds=int(time.time()))
    assert deliver(callback(receiver.url("/a?b=c"), now), **PRIVATE).result == {"status": 200}
    (received,) = receiver.received
    assert (received.method, received.path, received.body) == ("POST", "/a?b=c", BODY)
    assert received.headers["content-type"] == "application/json"
    assert received.headers["user-agent"] == "agent-orchestrator"
    assert received.headers["webhook-id"] == "msg_9"
    secret = "whsec_" + "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
    assert is_signed(received, secret)
    assert not is_signed(received, secret.replace("a2s=", "a2w="))
    assert not is_signed(replace(received, body=BODY + b" "), secret)


def test_without_a_secret_nothing_is_signed(receiver: Receiver) -> None:
    deliver(receiver.url(), **PRIVATE)
    assert "webhook-signature" not in receiver.received[0].headers


# --- where it goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("address", [one for one in NOT_PUBLIC if ":" in one or "." in one])
def test_a_name_that_leads_to_an_address_that_is_not_public_is_not_called(
    receiver: Receiver, names: Names, address: str
) -> None:
    names["hooks.example"] = [["93.184.216.34", address]]
    with pytest.raises(Permanent, match=r"hooks\.example .* not public .*callbacks\.allow_private"):
        deliver(receiver.url(host="hooks.example"))
    assert receiver.received == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_no_spelling_of_this_machine_is_called_once_there_is_a_key(
    receiver: Receiver, host: str
) -> None:
    with pytest.raises(Permanent, match="not public"):
        deliver(receiver.url(host=host))
    assert receiver.received == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1"])
def test_while_there_is_no_key_this_machine_is_called_and_nothing_else_that_is_private(
    receiver: Receiver, names: Names, host: str
) -> None:
    assert deliver(callback(receiver.url(host=host), NO_KEYS)).result == {"status": 200}
    for address in (
        "10.0.0.1",
        "169.254.169.254",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "64:ff9b::7f00:1",
    ):
        names["hooks.example"] = [[address]]
        with pytest.raises(Permanent, match="not public"):
            deliver(callback(receiver.url(host="hooks.example"), NO_KEYS))
    assert len(receiver.received) == 1


def test_a_name_that_leads_elsewhere_at_the_second_look_up_is_not_looked_up_again(
    receiver: Receiver, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judged address is dialled. The control shows the danger: a client that looks up anew."""
    names["rebound.example"] = [["93.184.216.34"], ["127.0.0.1"]]
    dialled: list[str] = []

    async def dial(self: Any, protocol: Any, host: Any, port: int, **more: Any) -> Any:
        dialled.append(str(host))
        raise OSError("no network here")

    url = receiver.url(host="rebound.example")
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "sock_connect", dial, raising=False)
        patch.setattr(asyncio.BaseEventLoop, "create_connection", dial)
        with pytest.raises(Failure, match=r"rebound\.example cannot be reached"):
            deliver(url)
    assert dialled == ["93.184.216.34"]
    assert names["rebound.example"] == [["127.0.0.1"]]  # one look-up was made
    assert receiver.received == []
    with httpx.Client(trust_env=False) as careless:
        assert careless.post(url).status_code == 200


def test_each_attempt_is_judged_anew(receiver: Receiver, names: Names) -> None:
    names["moved.example"] = [["127.0.0.1"], ["10.0.0.1"]]
    task = callback(receiver.url(host="moved.example"), NO_KEYS)
    assert deliver(task).verdict == "succeeded"
    with pytest.raises(Permanent, match="not public"):
        deliver(task)
    assert receiver.received[0].headers["host"] == f"moved.example:{receiver.port}"


def test_no_proxy_of_the_environment_is_used(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    assert deliver(receiver.url(), **PRIVATE).verdict == "succeeded"


@pytest.mark.parametrize("url", ["ftp://a/", "a", "", None, 7, "http://user:word@a/"])
def test_what_is_no_web_address_is_permanent(url: Any) -> None:
    with pytest.raises(Permanent):
        deliver(callback(url))


# --- what an answer means --------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_2xx_is_success(receiver: Receiver, status: int) -> None:
    receiver.answers(status)
    assert deliver(receiver.url(), **PRIVATE).result == {"status": status}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 425, 429, 500, 502, 503, 599])
def test_other_answers_are_tried_again(receiver: Receiver, status: int) -> None:
    receiver.answers(Answer(status, body=b"secret of the inside"))
    with pytest.raises(Failure) as failed:
        deliver(receiver.url(), **PRIVATE)
    assert str(failed.value) == f"127.0.0.1 answered {status}"


def test_410_is_permanent(receiver: Receiver) -> None:
    receiver.answers(410)
    with pytest.raises(Permanent, match="answered 410"):
        deliver(receiver.url(), **PRIVATE)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_is_not_followed(receiver: Receiver, status: int) -> None:
    receiver.answers(Answer(status, (("Location", receiver.url("/else")),)))
    with pytest.raises(Failure, match=f"answered {status}; redirects are not followed"):
        deliver(receiver.url(), **PRIVATE)
    assert [one.path for one in receiver.received] == ["/hook"]


def test_an_answer_without_end_is_hung_up_on(receiver: Receiver) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 10_000

    receiver.answers(Answer(200, body=endless))
    assert deliver(receiver.url(), **PRIVATE).result == {"status": 200}
    assert receiver.hung_up.wait(5)


def test_an_answer_that_trickles_is_success_all_the_same(receiver: Receiver) -> None:
    """The receiver has said yes: to send it again would be a repetition for nothing."""

    def trickle() -> Iterator[bytes]:
        while True:
            yield b"x"
            time.sleep(0.02)

    receiver.answers(Answer(200, body=trickle))
    begun = time.monotonic()
    assert deliver(receiver.url(), **PRIVATE).result == {"status": 200}
    assert time.monotonic() - begun < 4.5


def test_a_receiver_that_says_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(Failure, match=r"gave no answer"):
            deliver(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_seconds=0.3, **PRIVATE)
    assert time.monotonic() - begun < 4


def test_headers_that_trickle_do_not_stretch_the_time() -> None:
    """Each single wait is short enough; all of them together are not."""
    ended = threading.Event()

    def trickle(listener: socket.socket) -> None:
        conn, _ = listener.accept()
        with conn:
            conn.recv(65536)
            try:
                conn.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not ended.wait(0.05):
                    conn.sendall(b"x")
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=trickle, args=(listener,), daemon=True)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(Failure, match=r"no answer within 0\.4 s"):
            deliver(f"http://127.0.0.1:{port}/", timeout_seconds=0.4, **PRIVATE)
        assert time.monotonic() - begun < 4
        ended.set()
        thread.join(5)


def test_what_garbage_says_is_not_told() -> None:
    """http clients quote what they cannot read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk_nonsense() -> None:
            conn, _ = listener.accept()
            with conn:
                conn.recv(65536)
                conn.sendall(b"SECRET-OF-THE-INSIDE\r\n\r\n")

        thread = threading.Thread(target=talk_nonsense, daemon=True)
        thread.start()
        with pytest.raises(Failure) as failed:
            deliver(f"http://127.0.0.1:{listener.getsockname()[1]}/", **PRIVATE)
        thread.join(5)
    assert "SECRET" not in str(failed.value)
    assert str(failed.value) == "127.0.0.1 gave no answer: RemoteProtocolError"


def test_nobody_there_and_a_name_that_leads_nowhere_are_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Failure, match="cannot be reached"):
        deliver(f"http://127.0.0.1:{port}/", **PRIVATE)
    with pytest.raises(Failure, match="leads nowhere"):
        deliver("http://nowhere.invalid/")


def test_neither_secret_nor_body_is_in_what_is_logged_of_a_callback() -> None:
    task = callback("http://a.example/", replace(SENDER, secret=b"kept to ourselves........"))
    assert "kept to" not in repr(task)
    assert "task_id" not in repr(task.message)
