"""What the routes work with, made once per process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from api.changes import Changes
from api.database import Database
from api.feeds import Feeds
from api.keys import Keys
from api.quotas import Quotas
from api.submission import SubmitWriter
from config import Settings


@dataclass(frozen=True)
class ApiServices:
    settings: Settings
    database: Database
    writer: SubmitWriter
    changes: Changes
    feeds: Feeds
    keys: Keys
    quotas: Quotas


async def services_of_request(request: Request) -> ApiServices:
    services: ApiServices = request.state.services
    return services


Services = Annotated[ApiServices, Depends(services_of_request)]
