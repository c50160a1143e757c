"""The page's files: what is served, how, and that nothing in them comes from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.browser.conftest import Stack
from tests.support.processes import Processes

WEB = Path(__file__).resolve().parents[2] / "web"
FILES = sorted(file.name for file in WEB.iterdir())
TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize("name", ["", *FILES])
def test_each_file_comes_with_its_type_and_the_policy(stack: Stack, name: str) -> None:
    answer = stack.api.http.get(f"/web/{name}" if name else "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == TYPES[(name or ".html").split(".")[-1]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy


def test_a_browser_that_has_a_file_is_told_so_and_one_that_has_an_older_one_gets_it(
    http: httpx.Client,
) -> None:
    tag = http.get("/web/main.js").headers["etag"]
    again = http.get("/web/main.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/web/main.js", headers={"If-None-Match": '"old"'}).status_code == 200
    assert http.head("/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/web/", "/web/nothing.js", "/web/..%2fmain.py", "/web/../main.py", "/web/.env"]
)
def test_nothing_else_is_served(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404
    assert answer.json() == {"error": "not found"}


def test_the_page_is_served_without_a_database(processes: Processes) -> None:
    api = processes.api(env={"DATABASE_URL": "postgresql://a:b@127.0.0.1:9/none"}, ready=False)
    assert api.http.get("/").status_code == 200
    assert api.http.get("/web/style.css").status_code == 200


def test_no_module_is_too_long_to_be_read_at_once() -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in WEB.glob("*.js")}
    assert {name: lines for name, lines in lengths.items() if lines > 300} == {}


def test_nothing_comes_from_elsewhere_and_data_never_becomes_markup() -> None:
    elsewhere = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""")
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(")
    inline = re.compile(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=")
    for name in FILES:
        text = (WEB / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert elsewhere.findall(text) == [], name
        assert markup.findall(text) == [], name
        assert name.endswith(".js") or inline.findall(text) == [], name
