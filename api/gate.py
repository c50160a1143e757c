"""Nobody passes without a key, once there is one: asked before anything else looks at a request.

It stands in front of all routes and not in each of them, so that a new route is closed until it is
named here.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from api.headers import header
from api.keys import Keys
from api.problems import answer_to
from errors import OrchestratorError
from queries.keys import ApiKey

# Probes, documents and the page's own files: they show nobody's data.
PUBLIC = {"/", "/healthz", "/readyz", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
PUBLIC_FOLDER = "/web/"
# The streams that a ticket opens.
EVENTS = re.compile(r"/(?P<kind>runs|tasks)/(?P<reference>[A-Za-z0-9_-]{1,64})/events")

TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")

KEY_IN_SCOPE = "orchestrator.key"


class Gate:
    """Middleware: notes the key of a request (None: none is needed), or answers 401, 429, 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not is_public(path_of(scope)):
            services = scope["state"]["services"]
            try:
                scope[KEY_IN_SCOPE] = key = await key_of(scope, services.keys)
                if (tenant := whose_share(scope, key)) is not None:
                    await services.quotas.take_request(tenant)
            except OrchestratorError as refused:
                await answer_to(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(PUBLIC_FOLDER)


def path_of(scope: Scope) -> str:
    """The path as the routes know it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def key_of(scope: Scope, keys: Keys) -> ApiKey | None:
    presented = header(scope, b"x-api-key")
    if presented is None and EVENTS.fullmatch(path_of(scope)):
        tickets = parse_qs(scope["query_string"].decode("latin-1")).get("ticket")
        if tickets:
            return await keys.admit_ticket(tickets[0], path_of(scope))
    return await keys.admit(presented)


def whose_share(scope: Scope, key: ApiKey | None) -> str | None:
    """The tenant whose requests are counted; None: an operator's, or one that is refused anyway."""
    if key is not None:
        return key.tenant
    tenant = header(scope, b"x-tenant-id")
    if tenant is None:
        return "default"
    return tenant if TENANT.fullmatch(tenant) else None
