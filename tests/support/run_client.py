"""A tenant's view of runs over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

Step = dict[str, Any]

# As the reference has it, word for word.
EXAMPLE = b"""{
    "goal": "Research and summarize a topic",
    "steps": [
      { "name": "tool_call.fetch_data", "input": { "tool": "fetch_data" } },
      { "name": "llm_call.summarize", "input": { "prompt": "..." },
        "dependsOn": ["tool_call.fetch_data"] }
    ]
}"""


def tool(name: str, *needs: str, tool: str = "echo", **fields: Any) -> Step:
    """A step that calls a tool."""
    return {"name": name, "input": {"tool": tool}, "dependsOn": list(needs), **fields}


def llm(name: str, *needs: str, prompt: Any = "Say something.", **given: Any) -> Step:
    """A step that asks a model."""
    return {"name": name, "input": {"prompt": prompt, **given}, "dependsOn": list(needs)}


def agent(name: str, *needs: str, task: Any = "Write something.", **given: Any) -> Step:
    """A step that the agent team works on."""
    return {"name": name, "input": {"task": task, **given}, "dependsOn": list(needs)}


def approval(name: str, *needs: str, **given: Any) -> Step:
    """A step that waits for a person."""
    return {"name": name, "input": given, "dependsOn": list(needs)}


class RunClient:
    """Sends requests of one tenant."""

    def __init__(self, http: httpx.Client, tenant: str) -> None:
        self.http, self.tenant = http, tenant

    def call(self, method: str, path: str, key: str | None = None, **sent: Any) -> httpx.Response:
        headers = {"X-Tenant-Id": self.tenant} | ({} if key is None else {"Idempotency-Key": key})
        headers |= sent.pop("headers", {})
        return self.http.request(method, path, headers=headers, timeout=60, **sent)

    def post(self, body: Any, key: str | None = None) -> httpx.Response:
        """POST /runs with a body, or with these very bytes as JSON."""
        if isinstance(body, bytes):
            json = {"Content-Type": "application/json"}
            return self.call("POST", "/runs", key, content=body, headers=json)
        return self.call("POST", "/runs", key, json=body)

    def post_steps(self, *steps: Any, key: str | None = None) -> httpx.Response:
        return self.post({"goal": "a goal", "steps": list(steps)}, key)

    def submit(self, *steps: Any) -> dict[str, Any]:
        """The run of these steps, as POST /runs answers it."""
        answer = self.post_steps(*steps)
        assert answer.status_code == 201, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    def read(self, path: str, **params: Any) -> dict[str, Any]:
        answer = self.call("GET", path, params=params)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    def run(self, run_id: int) -> dict[str, Any]:
        return self.read(f"/runs/{run_id}")

    def statuses(self, run_id: int) -> dict[str, str]:
        """Of the run, under the name "run", and of each of its steps."""
        run = self.run(run_id)
        return {"run": run["status"]} | {step["name"]: step["status"] for step in run["steps"]}

    def cancel(self, run_id: Any) -> httpx.Response:
        return self.call("DELETE", f"/runs/{run_id}")

    def approve(self, task_id: Any, body: Any = None, **sent: Any) -> httpx.Response:
        sent = sent if body is None else {"json": body}
        return self.call("POST", f"/tasks/{task_id}/approve", **sent)

    def number_of(self, run_id: int, name: str) -> int:
        """The task's number of a step."""
        return next(int(s["task_id"]) for s in self.run(run_id)["steps"] if s["name"] == name)
