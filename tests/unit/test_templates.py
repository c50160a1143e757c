"""runs/templates.py: what is a template, what it becomes, and what stays as it is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from runs.templates import (
    MissingOutput,
    Reference,
    TemplateError,
    as_text,
    fill,
    filled_text,
    references,
    templated,
)

FETCH = Reference("tool_call.fetch_data")
OUTPUTS: dict[Reference, Any] = {
    FETCH: {"rows": [1, 2], "title": "Überblick"},
    Reference("tool_call.fetch_data", ("rows",)): [1, 2],
    Reference("tool_call.fetch_data", ("rows", "0")): 1,
    Reference("tool_call.fetch_data", ("title",)): "Überblick",
    Reference("plain"): "text",
    Reference("plain", ("none",)): None,
    Reference("plain", ("yes",)): True,
    Reference("plain", ("price",)): 0.5,
    Reference("plain", ("evil",)): "{{ plain.output }} and {{",
}


# --- reading ---------------------------------------------------------------------------------

READ = {
    "{{ tool_call.fetch_data.output }}": [FETCH],
    "{{tool_call.fetch_data.output}}": [FETCH],
    "{{\n\ttool_call.fetch_data.output \r\n}}": [FETCH],
    "{{ fetch.output.rows.0.a-b_c }}": [Reference("fetch", ("rows", "0", "a-b_c"))],
    "{{ llm_call.a.output }}{{ agent_call.b.output }} {{ approval.c.output.feedback }}": [
        Reference("llm_call.a"),
        Reference("agent_call.b"),
        Reference("approval.c", ("feedback",)),
    ],
    "{{ approval.output }}": [Reference("approval")],
    "{{ approval.output.output }}": [Reference("approval.output")],
    "{{ output.output.output }}": [Reference("output", ("output",))],
    "{{ a.output }} {{ b.output }} {{ a.output }}": [Reference("a"), Reference("b")],
    f"{{{{ {'n' * 64}.output }}}}": [Reference("n" * 64)],
    '{{ "{{" }} a.output }}': [],
    "no template: { a } {a: {b: {}}} }} {": [],
    "": [],
}


@pytest.mark.parametrize(("text", "found"), READ.items())
def test_references_are_found_in_order_and_none_twice(text: str, found: list[Reference]) -> None:
    assert references(text) == found


def test_references_are_found_in_every_string_of_a_value_but_not_in_keys() -> None:
    value = {
        "{{ key.output }}": 1,
        "a": ["x", {"b": "{{ one.output }}"}, ["{{ two.output.1 }}", None, 5, True]],
        "c": "{{ three.output }} {{ one.output }}",
    }
    assert [str(found) for found in references(value)] == [
        "one.output", "two.output.1", "three.output",
    ]  # fmt: skip
    assert fill({"{{ key.output }}": 1}, {}) == {"{{ key.output }}": 1}


BAD = [
    "{{ }}",
    "{{}}",
    "{{ fetch }}",
    "{{ fetch.result }}",
    "{{ fetch.output. }}",
    "{{ fetch.output..a }}",
    "{{ .output }}",
    "{{ fetch.output.a b }}",
    "{{ fetch.output[0] }}",
    "{{ fetch.output | upper }}",
    "{{ other_call.fetch.output }}",
    "{{ tool_call.a.b.output }}",
    "{{ é.output }}",
    "{{\u00a0a.output }}",
    "{{ 7 * 7 }}",
    "{{ {{ a.output }} }}",
    "{{{ a.output }}}",
    "{{ '{{' }}",
    '{{ "}}" }}',
    f"{{{{ {'n' * 65}.output }}}}",
    "{{ a.output } }",
    "{{ a.output",
    "{{",
]


@pytest.mark.parametrize("text", BAD)
def test_a_template_that_is_no_reference_is_refused_and_quoted(text: str) -> None:
    for embedded in (text, f"before {text}"):
        with pytest.raises(TemplateError) as refused:
            references({"a": [embedded]})
        assert str(refused.value).startswith(text[: text.find("}}") + 2 or None])
        with pytest.raises(TemplateError):
            fill({"a": [embedded]}, OUTPUTS)


def test_a_long_piece_of_nonsense_is_quoted_shortly() -> None:
    with pytest.raises(TemplateError) as refused:
        references("{{ " + "x" * 1_000_000 + " }}")
    assert len(str(refused.value)) < 300


# --- filling ---------------------------------------------------------------------------------

FILLED: dict[str, Any] = {
    "{{ tool_call.fetch_data.output }}": {"rows": [1, 2], "title": "Überblick"},
    "{{ tool_call.fetch_data.output.rows.0 }}": 1,
    "{{ plain.output.none }}": None,
    "{{ plain.output.yes }}": True,
    "{{ plain.output.price }}": 0.5,
    "{{ plain.output }}": "text",
    " {{ tool_call.fetch_data.output.rows.0 }}": " 1",
    "{{ tool_call.fetch_data.output.rows.0 }}\n": "1\n",
    "see {{ tool_call.fetch_data.output }}!": 'see {"rows":[1,2],"title":"Überblick"}!',
    "{{ plain.output }}, {{ tool_call.fetch_data.output.title }}": "text, Überblick",
    "{{ plain.output.none }} {{ plain.output.yes }} {{ plain.output.price }}": "null true 0.5",
    '{{ "{{" }} plain.output }}': "{{ plain.output }}",
    '{{"{{"}}': "{{",
    '{{ "{{" }}{{ plain.output }}': "{{text",
    "{ plain.output } }}": "{ plain.output } }}",
}


@pytest.mark.parametrize(("text", "becomes"), FILLED.items())
def test_a_template_alone_keeps_its_type_and_elsewhere_it_becomes_text(
    text: str, becomes: Any
) -> None:
    filled = fill(text, OUTPUTS)
    assert filled == becomes
    assert type(filled) is type(becomes)


def test_what_went_in_is_data_even_when_it_looks_like_a_template() -> None:
    evil = "{{ plain.output.evil }}"
    assert fill(evil, OUTPUTS) == "{{ plain.output }} and {{"
    assert fill(f"{evil}|{evil}", OUTPUTS) == "{{ plain.output }} and {{|{{ plain.output }} and {{"
    outputs = {Reference("a"): {"deep": ["{{ b.output }}"]}, Reference("b"): "secret"}
    assert fill(["{{ a.output }}"], outputs) == [{"deep": ["{{ b.output }}"]}]
    # Two values that would make a template together.
    halves = {Reference("a"): "{{ b", Reference("c"): ".output }}", Reference("b"): "secret"}
    assert fill("{{ a.output }}{{ c.output }}", halves) == "{{ b.output }}"


def test_filling_changes_neither_the_value_nor_the_outputs() -> None:
    value = {"a": ["{{ plain.output }}", {"b": "{{ tool_call.fetch_data.output }}"}]}
    before, outputs = json.dumps(value), json.dumps(list(OUTPUTS.values()))
    filled = fill(value, OUTPUTS)
    assert filled == {"a": ["text", {"b": OUTPUTS[FETCH]}]}
    assert json.dumps(value) == before
    assert json.dumps(list(OUTPUTS.values())) == outputs


@pytest.mark.parametrize("value", [None, True, 0, 1.5, [], {}, "", [None, {"a": []}]])
def test_a_value_without_templates_stays_as_it_is(value: Any) -> None:
    assert fill(value, {}) == value
    assert references(value) == []


def test_an_output_that_is_not_there_is_named() -> None:
    for text in ("{{ tool_call.a.output.rows.7 }}", "x {{ tool_call.a.output.rows.7 }}"):
        with pytest.raises(MissingOutput, match=r"\{\{ tool_call\.a\.output\.rows\.7 \}\}"):
            fill({"prompt": text}, {})


def test_strings_of_any_script_go_in_as_they_are() -> None:
    outputs = {Reference("a"): "日本 🦉 \u202e ünï", Reference("b"): {"日": "🦉"}}
    assert fill("→{{ a.output }}← {{ b.output }}", outputs) == '→日本 🦉 \u202e ünï← {"日":"🦉"}'


# --- limits ----------------------------------------------------------------------------------


def test_values_of_any_depth_are_read_and_filled() -> None:
    deep: Any = "{{ plain.output }}"
    for _ in range(50_000):
        deep = [deep]
    assert references(deep) == [Reference("plain")]
    filled = fill(deep, OUTPUTS)
    while isinstance(filled, list):
        (filled,) = filled
    assert filled == "text"
    while isinstance(deep, list):  # taken apart by hand: its end would be recursive, too
        (deep,) = deep


def test_a_value_too_deep_to_be_written_is_an_error_and_not_a_crash() -> None:
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="deep"):
        fill("x {{ plain.output }}", {Reference("plain"): deep})


@pytest.mark.parametrize(
    "text",
    [
        "{" * 1_000_000,
        "}" * 1_000_000,
        "{{" + " " * 1_000_000,
        "{{ a.output" + " " * 1_000_000,
        "{{ a.output" + ".a" * 500_000,
        "{{ " + "a" * 1_000_000,
        "{{ " + "approval." * 100_000,
        "{ {" * 300_000,
        "{{ a.output }}" * 70_000,
        '{{ "{{" }}' * 100_000,
    ],
    ids=lambda text: text[:14],
)
def test_a_megabyte_of_braces_is_read_in_no_time(text: str) -> None:
    begun = time.monotonic()
    try:
        references(text)
    except TemplateError as refused:
        assert len(str(refused)) < 300  # noqa: PT017
    assert time.monotonic() - begun < 10


def test_what_is_put_in_has_a_limit_however_often_it_is_asked_for() -> None:
    outputs = {Reference("a"): "é" * 50, Reference("b"): {"k": "v" * 92}}
    assert len(fill("{{ a.output }}" * 3, outputs, max_bytes=300)) == 150
    with pytest.raises(TemplateError, match=r"a\.output.*more than 299 bytes"):
        fill("{{ a.output }}" * 3, outputs, max_bytes=299)
    # Values that keep their type count as the JSON that they will become.
    fill(["{{ b.output }}"] * 3, outputs, max_bytes=300)
    with pytest.raises(TemplateError, match=r"b\.output"):
        fill(["{{ b.output }}"] * 4, outputs, max_bytes=300)
    with pytest.raises(TemplateError):  # and not gigabytes first
        fill("{{ a.output }}" * 100_000, {Reference("a"): "x" * 1_000_000}, max_bytes=10_000_000)


# --- where templates are ---------------------------------------------------------------------


def test_each_kind_of_step_has_its_templates_in_one_place() -> None:
    assert templated("prompt", {"prompt": "p", "model": "{{ x }}"}) == "p"
    assert templated("tool", {"tool": "{{ x }}", "args": {"a": 1}}) == {"a": 1}
    assert templated("agent", {"task": "t", "graph": "{{ x }}"}) == "t"
    assert templated("approval", {"question": "q"}) == {"question": "q"}
    assert templated("tool", {"tool": "echo"}) is None
    assert templated("run", {"goal": "{{ x }}"}) is None
    assert templated("prompt", None) is None


def test_a_prompt_and_a_task_are_filled_in_alike_and_no_longer_than_they_may_be() -> None:
    text = "about {{ plain.output }}: {{ plain.output.price }}"
    assert filled_text("prompt", {"prompt": text}, OUTPUTS, 100) == "about text: 0.5"
    assert filled_text("agent", {"task": text, "graph": "team"}, OUTPUTS, 100) == "about text: 0.5"
    assert filled_text("agent", {"task": "{{ plain.output.yes }}"}, OUTPUTS, 100) == "true"
    evil = filled_text("agent", {"task": "{{ plain.output.evil }}"}, OUTPUTS, 100)
    assert evil == "{{ plain.output }} and {{"
    with pytest.raises(MissingOutput):
        filled_text("agent", {"task": "{{ nobody.output }}"}, OUTPUTS, 100)
    with pytest.raises(TemplateError, match=r"the task, filled in, is 21 bytes long; limits\.max"):
        filled_text("agent", {"task": "x" * 17 + "{{ plain.output }}"}, OUTPUTS, 20)


def test_a_text_stays_a_text_and_the_rest_becomes_compact_json() -> None:
    assert as_text("a") == "a"
    assert as_text({"a": [1, None, "ü"]}) == '{"a":[1,null,"ü"]}'
