"""Every error as {"error": "<plain words>"}, with "detail" where a field is to blame."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from api.models import AGENT_TASK, PROMPT_TASK, AgentTask
from errors import (
    DatabaseUnavailable,
    FieldRefused,
    KeyReused,
    NameInUse,
    NotFound,
    OrchestratorError,
    OtherTenant,
    RequestRefused,
    SchemaOutdated,
    StateConflict,
    TooLarge,
    TooMany,
    Unauthorized,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = "2"
MOST_PROBLEMS_TOLD = 20
BODY_TOO_LARGE = "the body is larger than limits.max_body_bytes of config.toml"
STATUS_OF: dict[type[OrchestratorError], int] = {
    Unauthorized: 401,
    OtherTenant: 403,
    NotFound: 404,
    StateConflict: 409,
    NameInUse: 409,
    TooLarge: 413,
    FieldRefused: 422,
    KeyReused: 422,
    TooMany: 429,
    DatabaseUnavailable: 503,
    SchemaOutdated: 503,
}


def problem(status: int, error: str, detail: Any = None, **headers: str) -> JSONResponse:
    body = {"error": error} if detail is None else {"error": error, "detail": detail}
    return JSONResponse(body, status, headers)


def handle_problems(app: FastAPI) -> None:
    """Teach `app` to answer each kind of error in our shape."""
    app.add_exception_handler(OrchestratorError, _own)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _fault)


def answer_to(error: OrchestratorError) -> JSONResponse:
    """What a request is answered that ended with one of our errors."""
    default = 400 if isinstance(error, RequestRefused) else 500
    status = STATUS_OF.get(type(error), default)
    if status == 503:
        return problem(503, str(error), **{"Retry-After": RETRY_AFTER_SECONDS})
    if isinstance(error, TooMany):
        return problem(429, str(error), **{"Retry-After": str(error.retry_after_seconds)})
    if status == 401:
        return problem(401, str(error), **{"WWW-Authenticate": "ApiKey"})
    if isinstance(error, RequestRefused) and error.field is not None:
        blame = {"field": error.field, "message": str(error)}
        return problem(status, f"{error.field}: {error}", [blame])
    return problem(status, str(error))


async def _own(request: Request, error: OrchestratorError) -> JSONResponse:
    return answer_to(error)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """422 that names each field; 400 for a body that is not JSON at all."""
    found = error.errors()
    if any(one["type"] == "json_invalid" for one in found):
        return problem(400, f"the body is not JSON: {found[0]['ctx']['error']}")
    problems = [_blame(one) for one in found[:MOST_PROBLEMS_TOLD]]
    sentence = "; ".join(f"{one['field']}: {one['message']}" for one in problems)
    if len(found) > len(problems):
        sentence += f"; and {len(found) - len(problems)} more"
    return problem(422, sentence, problems)


def _blame(error: Any) -> dict[str, str]:
    place, *path = [str(part) for part in error["loc"] if part not in (PROMPT_TASK, AGENT_TASK)]
    if words := _words_of_two_bodies(error):
        message = words
    elif error["type"] == "extra_forbidden":
        message = "this field is not known here"
    elif error["type"] == "value_error":
        message = str(error["ctx"]["error"])
    elif not path and error["type"] in ("model_attributes_type", "dict_type"):
        message = "send one JSON object, with the header Content-Type: application/json"
    else:
        message = error["msg"]
    return {"field": ".".join(path) or place, "message": message}


def _words_of_two_bodies(error: Any) -> str | None:
    """What is wrong, where it is that a task is half a prompt and half an agent job, or neither."""
    what, field = error["type"], str(error["loc"][-1])
    if PROMPT_TASK in error["loc"]:
        if what == "missing" and field == "prompt":
            return "there is neither prompt, for one answer, nor task, for an agent job; send one"
        if what == "extra_forbidden" and field in AgentTask.model_fields:
            return "only an agent job takes it: one with task instead of prompt"
    if AGENT_TASK in error["loc"] and what == "extra_forbidden" and field == "prompt":
        return "there is a task as well; send prompt, for one answer, or task, for an agent job"
    return None


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    return http_answer(request.scope, error)


def http_answer(scope: Scope, error: HTTPException) -> JSONResponse:
    """What a request is answered that the web framework, or the limit of bodies, has refused."""
    request = Request(scope)
    words = {
        404: "not found",
        405: f"{request.method} is not possible on {request.url.path}",
        413: BODY_TOO_LARGE,
        400: "the body cannot be read; send one JSON object, not too deeply nested",
    }
    headers = dict(error.headers or {})
    return problem(error.status_code, words.get(error.status_code, str(error.detail)), **headers)


async def _fault(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "this is a fault of ours; it was logged, and the request may be repeated")
