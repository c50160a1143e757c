"""The API on a thread of the test's own, to be looked into: real sockets, its tasks, its feeds."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

import uvicorn

from api.services import ApiServices
from config import Settings
from main import create_app
from tests.support.ports import free_port
from tests.support.processes import eventually


class Served:
    """uvicorn with the app, in this process; `options` are uvicorn's."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            create_app(settings), port=self.port, log_level="warning", lifespan="on", **options
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)

    @property
    def services(self) -> ApiServices:
        services: ApiServices = self.server.lifespan.state["services"]
        return services

    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def tasks(self) -> int:
        """How many asyncio tasks there are."""
        assert self._loop is not None
        return len(asyncio.all_tasks(self._loop))

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(serve())

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self.server.started)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.services.feeds.stop)
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
