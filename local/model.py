"""The local model: Ollama's API on localhost, answered by a small model that comes by pip.

`python -m local.model` answers for both model names of config.toml, so that no other code knows
whether a real Ollama or this stand-in is there. It logs to stderr and ends with its engine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from config import ConfigError, load_config
from local.ollama_app import STAND_IN, create_app
from local.ollama_engine import CONTEXT_TOKENS, Engine

GRACE_SECONDS = 1  # for answers that are nearly complete when the server is told to end

log = logging.getLogger("local.model")


def model_names() -> list[str]:
    """The names of the settings' [models], each once; raises ConfigError."""
    models = load_config().models
    return list(dict.fromkeys([models.local, models.cloud]))


class Host:
    """The uvicorn server and the engine it depends on: neither outlives the other."""

    def __init__(self, host: str, port: int, parallel: int, names: Sequence[str]) -> None:
        self._engine = Engine(parallel)
        self._failed = False
        config = uvicorn.Config(
            create_app(self._engine, names, self._lifespan),
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> int:
        """Serve until a signal comes or the engine fails; return the exit code."""
        self._server.run()
        return 1 if self._failed else 0

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._load())  # the port answers meanwhile
        yield
        await loading
        await self._engine.close()

    async def _load(self) -> None:
        try:
            await self._engine.load()
        except Exception:  # whatever it is, a server without a model is of no use
            log.exception("the model could not be loaded")
            self._failed = self._server.should_exit = True
        else:
            slots = self._engine.parallel
            log.info("ready: %d slots of %d tokens of context", slots, CONTEXT_TOKENS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server in the foreground."""
    parser = argparse.ArgumentParser(prog="python -m local.model", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=11434)
    parser.add_argument("--parallel", type=int, default=4, help="generations at the same time")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)  # uvicorn sends itself the signal again when it has ended
    try:
        names = model_names()
    except ConfigError as error:
        parser.error(str(error))
    for name in names:
        log.info("%s: %s", name, STAND_IN)
    return Host(arguments.host, arguments.port, arguments.parallel, names).run()


def _exit(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
