"""Whose request it is, and so what it may touch.

A key belongs to a tenant, or to an operator who sees all tenants. X-Tenant-Id narrows an operator's
view to one tenant, and says for whom an operator changes something; beside a tenant's key it may
only repeat what the key says. While no key was ever created it is believed.

What each request asks for is a coroutine, here and in services.py, though it waits for nothing:
FastAPI calls a plain function in a thread, and these would cost a request more than all the rest.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Query, Security
from fastapi.requests import HTTPConnection
from fastapi.security import APIKeyHeader

from api.gate import KEY_IN_SCOPE, TENANT
from errors import OtherTenant, RequestRefused
from queries.keys import ApiKey

NO_TENANT = (
    "an operator's key has no tenant of its own; name the one to act for in the header X-Tenant-Id"
)

XTenantId = Annotated[
    str | None,
    Header(description="with an operator's key, or while there is no key: the tenant"),
]
Ticket = Annotated[
    str | None, Query(description="from POST /tickets, for who cannot send a header")
]
# For the documents: the gate has looked at it before.
XApiKey = Annotated[
    str | None,
    Security(
        APIKeyHeader(
            name="X-API-Key",
            description="from `python admin.py keys create`; not needed while there is none",
            auto_error=False,
        )
    ),
]


async def key_of_connection(connection: HTTPConnection) -> ApiKey | None:
    """The key that the gate let in; None: none is needed."""
    key: ApiKey | None = connection.scope[KEY_IN_SCOPE]
    return key


Key = Annotated[ApiKey | None, Depends(key_of_connection)]


async def tenant_of_connection(key: Key, x_tenant_id: XTenantId = None) -> str | None:
    """The tenant whose rows may be read; None: an operator reads those of all tenants."""
    if x_tenant_id is not None and not TENANT.fullmatch(x_tenant_id):
        raise RequestRefused("X-Tenant-Id is to be 1 to 64 of A-Z a-z 0-9 _ -")
    if key is None:
        return x_tenant_id or "default"
    if key.tenant is None:
        return x_tenant_id
    if x_tenant_id not in (None, key.tenant):
        raise OtherTenant(
            f"this key is tenant {key.tenant}'s, and X-Tenant-Id names another; leave it out"
        )
    return key.tenant


async def any_tenant_of_request(
    tenant: Annotated[str | None, Depends(tenant_of_connection)], _: XApiKey = None
) -> str | None:
    """The same for what is no WebSocket."""
    return tenant


async def tenant_of_watcher(
    tenant: Annotated[str | None, Depends(any_tenant_of_request)], ticket: Ticket = None
) -> str | None:
    """The same for server-sent events, which a ticket opens as well; the gate looked at it."""
    return tenant


async def tenant_of_request(
    tenant: Annotated[str | None, Depends(any_tenant_of_request)],
) -> str:
    """The tenant for whom something is created or changed."""
    if tenant is None:
        raise RequestRefused(NO_TENANT)
    return tenant


async def counted_tenant_of_request(
    key: Key, tenant: Annotated[str | None, Depends(any_tenant_of_request)]
) -> str | None:
    """The tenant whose tasks are counted; None: all, as for everybody while there is no key."""
    return None if key is None else tenant


Tenant = Annotated[str, Depends(tenant_of_request)]
AnyTenant = Annotated[str | None, Depends(any_tenant_of_request)]
WatchingTenant = Annotated[str | None, Depends(tenant_of_watcher)]
SocketTenant = Annotated[str | None, Depends(tenant_of_connection)]
CountedTenant = Annotated[str | None, Depends(counted_tenant_of_request)]
