"""A body with too many values is refused before it is parsed, and an honest one never is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from api.bodies import has_more_values
from tests.support.client import JSON, Client, refused

hypothesis = pytest.importorskip(
    "hypothesis", reason="needs hypothesis: pip install -r requirements-dev.txt"
)
st = hypothesis.strategies

MOST = 100_000
TEXTS = st.text(st.sampled_from('a"\\,[]{}:\u20ac\n'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> int:
    """Every value; an empty list or object twice."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 1
    return 1 + (sum(map(counted, inner)) if value else 1)


@hypothesis.given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_values_are_counted_as_a_parser_would_find_them(
    value: Any, as_ascii: bool, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=as_ascii, indent=indent).encode()
    assert not has_more_values(body, counted(value))
    assert has_more_values(body, counted(value) - 1)


@hypothesis.given(VALUES, st.sampled_from(["utf-16", "utf-16-le", "utf-32-be"]))
def test_no_encoding_that_a_parser_takes_hides_values(value: Any, encoding: str) -> None:
    body = json.dumps(value, ensure_ascii=False).encode(encoding)
    assert json.loads(body) == value
    assert has_more_values(body, counted(value) - 1)


LISTS, TEXTS_ONLY = b",".join([b"[]"] * (MOST // 2)), b",".join([b'""'] * MOST)
OBJECTS = b",".join([b'{"a":0}'] * (MOST // 2))
BODIES: dict[str, bytes] = {
    "/tasks": b'{"prompt": "x", "metadata": {"x": [%s]}}',
    "/tasks/batch": b'{"tasks": [{"prompt": "x", "metadata": {"x": [%s]}}]}',
    "/runs": b'{"goal": "g", "steps": [{"name": "approval.a", "input": {"x": [%s]}}]}',
    "/tasks/1/approve": b'{"artefact": [%s]}',
}


def post(client: Client, path: str, body: bytes | Iterator[bytes]) -> httpx.Response:
    return client.http.post(path, content=body, headers={"X-Tenant-Id": client.tenant, **JSON})


@pytest.mark.parametrize("values", [LISTS, TEXTS_ONLY, OBJECTS], ids=["lists", "texts", "objects"])
@pytest.mark.parametrize("path", BODIES)
def test_a_body_with_too_many_values_is_refused_with_the_limits_name(
    client: Client, path: str, values: bytes
) -> None:
    body = BODIES[path] % values
    said = "the body holds more than 100000 values (limits.max_body_values)"
    assert refused(post(client, path, body), 422) == said
    assert refused(post(client, path, (body[n : n + 7777] for n in range(0, len(body), 7777))), 422)


HONEST: dict[str, Callable[[], Any]] = {
    "/tasks": lambda: {"prompt": '[{,:\\"' * 120_000},
    "/tasks/batch": lambda: {
        "tasks": [
            {"prompt": "Dear, [sir]: " * 400, "metadata": {f"k{n}": [n, n] for n in range(20)}}
            for _ in range(1000)
        ]
    },
    "/runs": lambda: {
        "goal": "the most steps with the most dependencies",
        "steps": [
            {
                "name": f"tool_call.s{n}",
                "input": {"tool": "echo", "args": {f"k{n}": [n, n] for n in range(20)}},
                "dependsOn": [f"tool_call.s{k}" for k in range(max(0, n - 5), n)],
            }
            for n in range(1000)
        ],
    },
}


@pytest.mark.parametrize("path", HONEST)
def test_the_largest_honest_bodies_are_taken(client: Client, path: str) -> None:
    answer = post(client, path, json.dumps(HONEST[path]()).encode())
    assert answer.status_code == 201, answer.text
