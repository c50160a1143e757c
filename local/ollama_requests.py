"""What a client may ask of Ollama's API: the request bodies, checked before anything runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class BadRequest(Exception):
    """The body is not what the API takes; the text says why."""


class _Body(BaseModel):
    # Strict: Ollama refuses "5" for a number too. It ignores what it does not know.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class Options(_Body):
    """The options that change something here; null or absent means the default."""

    num_predict: Int32 | None = None
    num_ctx: Int32 | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: Int32 | None = None
    top_p: float | None = None


class Message(_Body):
    """One turn of a conversation."""

    role: str
    content: str | None = None


class Ask(_Body):
    """What both calls have in common; `messages` is empty when only loading is asked for."""

    model: str = ""
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation to continue, for the chat template."""
        raise NotImplementedError


class GenerateAsk(Ask):
    """The body of /api/generate."""

    prompt: str = ""
    system: str = ""

    @property
    def turns(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}] if self.prompt else []


class ChatAsk(Ask):
    """The body of /api/chat."""

    messages: list[Message] = []

    @property
    def turns(self) -> list[dict[str, str]]:
        return [{"role": turn.role, "content": turn.content or ""} for turn in self.messages]


Asked = TypeVar("Asked", bound=Ask)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """Check a body, or raise BadRequest with the first thing that is wrong."""
    if not body.strip():
        raise BadRequest("missing request body")
    try:
        ask = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(": ".join(filter(None, [where, first["msg"]]))) from error
    if not ask.model:
        raise BadRequest("model is required")
    return ask
