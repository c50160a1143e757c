"""The words of OpenAI's API, in which the fake Ollama answers below /v1/, as the real one does."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def chunk(content: str | None = None, finish_reason: str | None = None, **delta: Any) -> bytes:
    """One event with a piece of an answer, or how it ended."""
    said = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": said | delta, "finish_reason": finish_reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event(head | {"choices": [choice], "usage": None})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The event before the last, which has no piece."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    total = {"total_tokens": prompt_tokens + completion_tokens}
    return event({"object": "chat.completion.chunk", "choices": [], "usage": counts | total})


def line(body: Any, content: str, thinking: str, **fields: Any) -> bytes:
    """What says the same as a line of Ollama's with these fields: one event, or the last three."""
    if not fields.get("done"):
        thought = {"reasoning_content": thinking} if thinking else {}
        return chunk(content or None, **thought)
    asked = (body.get("stream_options") or {}).get("include_usage")
    counts = usage(fields.get("prompt_eval_count", 0), fields.get("eval_count", 0))
    return chunk(None, fields["done_reason"]) + (counts if asked else b"") + DONE


def error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "scripted", "param": None, "code": code}}


def models(names: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
