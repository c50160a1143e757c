"""A submission that meets the end of the API: stored and told so, or refused and not stored."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import db
from api.submission import ENDING
from config import Settings
from tests.support.processes import eventually
from tests.support.served import Served


@pytest.mark.parametrize("named", [False, True])
def test_what_meets_the_end_is_stored_and_answered_201_or_not_stored_and_answered_503(
    settings: Settings, named: bool
) -> None:
    answers: Counter[int] = Counter()
    accepted: set[str] = set()
    telling = threading.Lock()

    def submit_until_refused(client: int) -> None:
        with httpx.Client(base_url=served.url, timeout=10) as http:
            while True:
                text = f"{client}-{answers[201]}"
                body = {"task": text, "task_id": f"job-{text}"} if named else {"prompt": text}
                answer = http.post("/tasks", json=body)
                with telling:
                    answers[answer.status_code] += 1
                    if answer.status_code == 201:
                        accepted.add(answer.json()["task_id"])
                if answer.status_code != 201:
                    assert answer.json() == {"error": ENDING}
                    assert "retry-after" in answer.headers
                    return

    # Whoever is not answered at all hears of it, and the server does not wait for ever.
    options = {"timeout_graceful_shutdown": 20}
    with Served(settings, **options) as served, ThreadPoolExecutor(4) as clients:
        submitting = [clients.submit(submit_until_refused, client) for client in range(4)]
        eventually(lambda: answers[201] > 50, what="it is in full swing")
        served.services.writer.close()
        for one in submitting:
            one.result(60)
        with served.services.database.connection() as conn:
            stored = db.fetch(conn, "SELECT coalesce(name, task_id::text) AS id FROM tasks")
    assert {row["id"] for row in stored} == {str(one) for one in accepted}
    assert answers == {201: len(stored), 503: 4}
