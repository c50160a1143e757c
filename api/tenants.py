"""Whose request it is."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Header

from errors import RequestRefused

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tenant_of_request(x_tenant_id: Annotated[str | None, Header()] = None) -> str:
    """The tenant of the header X-Tenant-Id, or `default`."""
    if x_tenant_id is None:
        return "default"
    if not NAME.fullmatch(x_tenant_id):
        raise RequestRefused("X-Tenant-Id is to be 1 to 64 of A-Z a-z 0-9 _ -")
    return x_tenant_id


Tenant = Annotated[str, Depends(tenant_of_request)]
