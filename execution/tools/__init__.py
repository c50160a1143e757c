"""Tools: functions that a step of kind tool may call.

A tool of your own is a plain or an async function; `[tools]` in config.toml gives it a name. These
two are for its author:

    from execution.tools import PermanentError, ToolContext

    def find_customer(number: int, context: ToolContext) -> dict:
        if number < 1:
            raise PermanentError("a customer's number is 1 or more")  # a dead letter at once
        return crm.find(number, key=context.idempotency_key)          # any other error: retried

Arguments are checked by the types of the parameters. What is returned has to be JSON. Each call has
a thread of its own, and an async function an event loop of its own, which ends with the call: what
belongs to a loop (an httpx.AsyncClient, say) cannot be kept for the next one.
"""

from execution.tools.context import PermanentError, ToolContext

__all__ = ["PermanentError", "ToolContext"]
