"""execution/prompt.py: templates, the model and the form of an answer. A scripted model server."""

from __future__ import annotations

import builtins
import dataclasses
import json
import threading
import urllib.request
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from execution import answers
from execution import prompt as prompt_module
from execution.routes import Routes
from execution.runner import Finished, Runner
from queries.leases import ClaimedTask, Lease, Outcome
from runs.templates import Reference
from scheduler import decide_route
from tests.conftest import settings_for
from tests.support import fake_ollama
from tests.support.fake_ollama import FakeOllama, answer, status
from tests.support.processes import eventually

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install -r requirements-agents.txt")

TOKEN = "00000000-0000-4000-8000-000000000000"
PERSON = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture
def fake() -> Iterator[FakeOllama]:
    with FakeOllama() as server:
        yield server


def run(
    fake: FakeOllama,
    payload: dict[str, Any],
    outputs: dict[Reference, Any] | None = None,
    is_step: bool = True,
    **limits: int,
) -> Outcome:
    """What comes of one prompt, of a step unless it is to be a lone task."""
    settings = settings_for(
        "postgresql://nobody@nowhere/none",
        ollama={"url": fake.url, "timeout_seconds": 5},
        cost={"local_per_token": "0.5", "local_prompt_per_token": "0.25"},
        limits=limits,
    )
    routes = Routes(settings.routing, decide_route)
    runner = Runner(settings, routes, lambda: None, lambda *_: None)
    lease = Lease(7, TOKEN, 3 if is_step else None)
    task = ClaimedTask(lease, 3, "prompt", payload, "auto", None, 1, 1, 0)
    task = dataclasses.replace(task, step="llm_call.it", outputs=outputs or {})
    runner.open()
    try:
        runner.start(task, "local")
        finished: list[Finished] = eventually(runner.take_finished)
    finally:
        runner.close()
    return finished[0][1]


def prompts(fake: FakeOllama) -> list[str]:
    return [call.prompt for call in fake.calls if call.path == "/api/generate"]


def bodies(fake: FakeOllama) -> list[dict[str, Any]]:
    return [call.body for call in fake.calls if call.path == "/api/generate"]


# --- templates -------------------------------------------------------------------------------


def test_a_step_s_prompt_is_filled_in_and_what_went_in_is_data(fake: FakeOllama) -> None:
    outputs = {Reference("a"): "{{ b.output }}", Reference("b", ("rows",)): [1, {"k": "ü"}]}
    payload = {"prompt": 'Say {{ a.output }} of {{ b.output.rows }} {{ "{{" }}'}
    assert run(fake, payload, outputs).verdict == "succeeded"
    assert prompts(fake) == ['Say {{ b.output }} of [1,{"k":"ü"}] {{']


def test_a_prompt_that_is_one_template_is_a_text_all_the_same(fake: FakeOllama) -> None:
    outcome = run(fake, {"prompt": "{{ a.output }}"}, {Reference("a"): {"x": [1]}})
    assert outcome.result == {"text": 'echo: {"x":[1]}'}


def test_a_lone_prompt_is_never_a_template(fake: FakeOllama) -> None:
    for prompt in ("{{ x }} {{", "{{ a.output }}"):
        outcome = run(fake, {"prompt": prompt}, {Reference("a"): "no"}, is_step=False)
        assert outcome.result == {"text": f"echo: {prompt}"}


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("{{ a.output.rows.9 }}", "{{ a.output.rows.9 }}: there is no such thing"),
        ("{{ a }}", "{{ a }} refers to nothing"),
        ("x" * 1001, "is 1001 bytes long; limits.max_prompt_bytes is 1000"),
        ("x" * 900 + "{{ long.output }}", "is 1020 bytes long"),
        ("{{ long.output }}" * 50, "more than 1000 bytes are filled in"),
    ],
)
def test_a_prompt_that_cannot_be_filled_in_is_permanent_and_costs_no_call(
    fake: FakeOllama, prompt: str, says: str
) -> None:
    outputs = {Reference("long"): "é" * 60, Reference("a"): {}}
    outcome = run(fake, {"prompt": prompt}, outputs, max_prompt_bytes=1000)
    assert outcome.verdict == "permanent"
    assert says in (outcome.error or "")
    assert prompts(fake) == []


# --- the model -------------------------------------------------------------------------------


def test_a_step_may_name_its_model(fake: FakeOllama) -> None:
    outcome = run(fake, {"prompt": "Hi", "model": "mistral:7b"})
    assert (outcome.model, bodies(fake)[0]["model"]) == ("mistral:7b", "mistral:7b")
    assert run(fake, {"prompt": "Hi"}).model == "llama3.2:latest"


def test_a_model_that_is_missing_is_named(fake: FakeOllama) -> None:
    fake.on("Hi", status(404, "model not found"))
    outcome = run(fake, {"prompt": "Hi", "model": "mistral:7b"})
    assert (outcome.verdict, outcome.model) == ("permanent", "mistral:7b")
    assert "ollama pull mistral:7b" in (outcome.error or "")


# --- the format ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "Ada", "age": 36}',
        ' {"name":\n"Ada","age":36}\n',
        '```json\n{"name":"Ada","age":36}\n```',
    ],
)
def test_an_answer_that_follows_the_schema_is_kept_as_json(fake: FakeOllama, said: str) -> None:
    fake.on("Hi", answer(said, tokens=4, prompt_tokens=2))
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert outcome.result == {"text": said, "json": {"name": "Ada", "age": 36}}
    assert bodies(fake)[0]["format"] == PERSON
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (2, 4)
    assert outcome.cost == Decimal("2.5")


def test_without_a_format_the_server_is_asked_for_none(fake: FakeOllama) -> None:
    assert run(fake, {"prompt": "Hi"}).result == {"text": "echo: Hi"}
    assert "format" not in bodies(fake)[0]


INVALID = {
    "no JSON": ("Sure! Here it is.", "it is no JSON"),
    "half of it": ('{"name": "Ada"', "it is no JSON"),
    "a missing property": ('{"age": 3}', "'name' is a required property"),
    "a wrong type": ('{"name": 5}', "$.name: 5 is not of type 'string'"),
    "a property too many": ('{"name": "Ada", "x": 1}', "'x' was unexpected"),
    "a number that JSON does not have": ('{"name": "Ada", "age": NaN}', "NaN is not in JSON"),
    "a number too long": ('{"name": "Ada", "age": ' + "9" * 5000 + "}", "digits"),
    "two values under one name": ('{"name": "Ada", "name": "Bob"}', "stands twice"),
    "JSON too deep": ("[" * 100_000, "it is no JSON"),
    "JSON rather deep": ("[" * 500 + "]" * 500, "nested deeper"),
}


@pytest.mark.parametrize(("said", "why"), INVALID.values(), ids=INVALID.keys())
def test_an_answer_that_does_not_is_sent_back_once_with_the_reason(
    fake: FakeOllama, said: str, why: str
) -> None:
    fake.on("Hi", [answer(said, tokens=4, prompt_tokens=2), answer('{"name": "Ada"}', tokens=8)])
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert outcome.result == {"text": '{"name": "Ada"}', "json": {"name": "Ada"}}
    first, second = prompts(fake)
    assert first == "Hi"
    assert second.startswith("Hi\n")
    assert why in second
    assert said[:100] in second
    assert len(second) < 6000
    assert [body["format"] for body in bodies(fake)] == [PERSON, PERSON]


def test_the_tokens_and_the_cost_of_both_calls_are_added_up(fake: FakeOllama) -> None:
    twice(fake, '{"name": "A"}')
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (8, 12)
    assert outcome.cost == Decimal("8.0")


def twice(fake: FakeOllama, second: str) -> None:
    """Answer "Hi" with nonsense, and then with that."""
    fake.on("Hi", [
        answer("no", tokens=4, prompt_tokens=2), answer(second, tokens=8, prompt_tokens=6),
    ])  # fmt: skip


def test_a_second_answer_that_does_not_follow_it_is_a_failure_that_was_paid(
    fake: FakeOllama,
) -> None:
    twice(fake, "no again")
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert outcome.verdict == "failure"
    assert "does not follow the format" in (outcome.error or "")
    assert len(prompts(fake)) == 2
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (8, 12)
    assert (outcome.cost, outcome.model) == (Decimal("8.0"), "llama3.2:latest")


@pytest.mark.parametrize(
    ("behaviour", "verdict"),
    [
        (status(503), "outage"),
        (status(500), "failure"),
        (status(400), "permanent"),
        (fake_ollama.cut(), "failure"),
    ],
)
def test_the_first_call_was_paid_however_the_second_one_ends(
    fake: FakeOllama, behaviour: fake_ollama.Behaviour, verdict: str
) -> None:
    fake.on("Hi", [answer("no", tokens=4, prompt_tokens=2), behaviour])
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert outcome.verdict == verdict
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (2, 4)
    assert outcome.cost == Decimal("2.5")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("json", "format is to be a JSON schema"),
        ({"pattern": "(a+)+$"}, "#/pattern is not taken"),
        ({"$ref": "http://169.254.169.254/"}, "only #/… is followed"),
        ({"minLength": "x"}, "format is no JSON schema: 'x' is not of type"),
    ],
)
def test_a_format_that_is_refused_is_permanent_and_costs_no_call(
    fake: FakeOllama, schema: Any, says: str
) -> None:
    outcome = run(fake, {"prompt": "Hi", "format": schema})
    assert outcome.verdict == "permanent"
    assert says in (outcome.error or "")
    assert prompts(fake) == []


def test_an_answer_that_is_too_much_work_to_check_is_a_failure_that_says_so(
    fake: FakeOllama,
) -> None:
    fake.on("Hi", [answer(json.dumps([1] * 500))] * 2)
    schema = {"items": {"allOf": [{}] * 1900}}
    outcome = run(fake, {"prompt": "Hi", "format": schema})
    assert outcome.verdict == "failure"
    assert "it is too long: to check it by this schema" in (outcome.error or "")


def test_a_schema_is_read_once_for_many_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(answers, "check_format", checked.append)
    for _ in range(3):
        assert answers.reader({"title": "read once"}, 1000)("5") == 5
    assert checked == [{"title": "read once"}]
    for n in range(2 * answers.MOST_SCHEMAS_KEPT):
        answers.reader({"title": f"read {n}"}, 1000)
    assert answers._validator.cache_info().currsize == answers.MOST_SCHEMAS_KEPT


def test_prompts_schemas_and_answers_are_read_off_the_runner_s_loop(
    fake: FakeOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(name: str) -> None:
        real = getattr(prompt_module, name)

        def call(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return real(*args)

        monkeypatch.setattr(prompt_module, name, call)

    for name in ("filled_text", "reader", "storable"):
        noted(name)
    fake.on("Hi", answer('{"name": "Ada"}'))
    outputs = {Reference("a"): "Hi"}
    assert run(fake, {"prompt": "{{ a.output }}", "format": PERSON}, outputs).result
    assert run(fake, {"prompt": "Hello"}).result
    assert len(threads) == 5
    assert "runner" not in threads


def test_a_schema_is_fetched_from_nowhere_even_if_it_were_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(answers, "check_format", lambda schema: None)
    monkeypatch.setattr(answers, "work_of_check", lambda schema, value: 0)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **more: fetched.append(args))
    read = answers.reader({"$ref": "http://127.0.0.1:9/schema"}, 1000)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        read("5")
    assert fetched == []


def test_the_json_that_is_kept_can_be_stored(fake: FakeOllama) -> None:
    fake.on("Hi", answer(json.dumps({"name": "a\0b\ud800"})))
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert outcome.result is not None
    assert outcome.result["json"] == {"name": "a\ufffdb\ufffd"}


def test_without_the_package_it_is_said_what_to_install(
    fake: FakeOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] == "jsonschema":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    outcome = run(fake, {"prompt": "Hi", "format": PERSON})
    assert outcome.verdict == "permanent"
    assert "requirements-agents.txt" in (outcome.error or "")
    assert run(fake, {"prompt": "Hi"}).verdict == "succeeded"
