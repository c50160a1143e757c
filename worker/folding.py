"""The worker's share of keeping figure_changes short: it folds a page of it now and then."""

from __future__ import annotations

import logging
import time

import psycopg2

from connection import Connection
from errors import DatabaseUnavailable, words_of
from queries.figures import fold_figures

logger = logging.getLogger("scheduler")

EVERY_SECONDS = 10.0
GO_ON_SECONDS = 1.0  # while there is more than a page


class Folding:
    """When it is time again."""

    def __init__(self) -> None:
        self._next = 0.0

    def fold(self, conn: Connection) -> None:
        """If it is time; the figures are exact without, so a failure is for the next time."""
        if time.monotonic() < self._next:
            return
        pause = EVERY_SECONDS
        try:
            if fold_figures(conn):
                pause = GO_ON_SECONDS
        except (DatabaseUnavailable, psycopg2.Error) as failed:
            logger.warning("The figures are not folded yet: %s", words_of(failed))
        self._next = time.monotonic() + pause
