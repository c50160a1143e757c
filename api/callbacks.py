"""What can be said of a callback_url before it is called: no name is looked up here.

Where a name leads is judged when the callback is sent, each time.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.concurrency import run_in_threadpool

from addresses import is_loopback, plain_addresses, web_url, why_not_public
from api.services import ApiServices
from errors import FieldRefused
from queries.webhooks import Sender, read_sender

LONGEST_URL = 2_000


async def check_callback_url(url: str | None, tenant: str, services: ApiServices) -> None:
    """FieldRefused("callback_url") if nothing can be sent there; None passes, and costs nothing."""
    if url is not None:
        await run_in_threadpool(check_callback_urls, {"callback_url": url}, tenant, services)


def check_callback_urls(urls: Mapping[str, str | None], tenant: str, services: ApiServices) -> None:
    """The same for many, by the field that is to blame: {"tasks.3.callback_url": url}.

    Asks the database once, if there is any URL: not for the event loop's thread.
    """
    given = {field: url for field, url in urls.items() if url is not None}
    if not given:
        return
    sender = services.database.run(read_sender, tenant)
    allow_private = services.settings.callbacks.allow_private_addresses
    for field, url in given.items():
        if refused := why_refused(url, sender, allow_private):
            raise FieldRefused(field, refused)
    if sender.keys_exist and sender.secret is None:
        raise FieldRefused(
            next(iter(given)),
            f"callbacks are signed, and tenant {tenant} has no secret for that yet; "
            f"run: python admin.py webhooks secret --tenant {tenant}",
        )


def why_refused(url: str, sender: Sender, allow_private: bool) -> str | None:
    """Why nothing can be sent to this URL, as far as that can be seen from its text."""
    if len(url) > LONGEST_URL:
        return f"it is longer than {LONGEST_URL} characters"
    try:
        addresses = plain_addresses(web_url(url))
    except ValueError as refused:
        return str(refused)
    for address in addresses:
        if allow_private or (is_loopback(address) and not sender.keys_exist):
            continue
        if what := why_not_public(address):
            return (
                f"it leads to an address that is not public ({what}); "
                "callbacks.allow_private_addresses of config.toml lets such calls through"
            )
    return None
