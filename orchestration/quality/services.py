"""Delivery to services that apprise knows: Slack, Teams, PagerDuty, Opsgenie, mail with TLS, and a hundred others.

A URL of apprise holds the service's token. So a receiver is named by the service and a digest of the URL, and of a
failure only the kind and the HTTP status are told: what apprise logs may quote addresses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

from pydantic import SecretStr

from orchestration.quality.transitions import DeliveryFailure, State
from streaming_jobs.platform.extras import MissingExtra, require

if TYPE_CHECKING:
    from apprise import AppriseAsset, AppriseResult

TIMEOUT = 10.0
"""Seconds for a whole delivery to a service, however slowly the service reads and answers."""
NOT_TAKEN = (400, 413, 422)
"""HTTP answers to a request that is too long or unreadable: repeating it would fail again."""
_PASSWORD = re.compile(r"(?<=://)([^/@:?]*):[^/?]*(?=@)|(?<=[?&])pass(?:word)?=[^&]*")
_HTTP = ("requests", "urllib3")
"""Libraries of apprise's plug-ins whose logs name addresses, at the level DEBUG."""
_SENDING = ContextVar("sending", default=False)
"""True in a delivery, and in apprise's workers: they have a copy of its context, also after its deadline."""
_SEPARATOR = 2
"""Characters that apprise puts between title and text for a service without titles."""


def named(urls: Iterable[SecretStr]) -> dict[str, str]:
    """The URLs by names that may be shown, such as `slack 3fa2c1`.

    A password, as of mail, is not in the digest, from which a weak one could be guessed: the name outlives it. A token
    is the address of its service, and in the digest.
    """
    texts = (url.get_secret_value() for url in urls)
    return {f"{text.partition('://')[0]} {_digest(text)}": text for text in texts}


def _digest(url: str) -> str:
    return sha256(_PASSWORD.sub(r"\1", url).encode()).hexdigest()[:6]


def notify(name: str, url: str, title: str, text: str, worst: State, *, several: bool) -> DeliveryFailure | None:
    """Send one message; `several`: it is of several alerts, and refused if it is longer than the service allows.

    A longer one of a single alert is cut off.
    """
    try:
        require("alerts", "quality.services")
    except MissingExtra as error:
        return DeliveryFailure(error.found)
    from apprise import Apprise, NotifyFormat, NotifyType, OverflowMode

    with _unlogged():
        service = Apprise.instantiate(url, asset=_asset())
        if not service:
            return DeliveryFailure(f"{name}: apprise does not know this URL, or it lacks a part")
        _filter_http()
        room = service.body_maxlen - (0 if service.title_maxlen else len(title) + _SEPARATOR)
        if several and len(text) > room:
            return DeliveryFailure(f"{name} takes {service.body_maxlen:,} characters", refused=True)
        service.overflow_mode = OverflowMode.TRUNCATE
        kind = {"passed": NotifyType.SUCCESS, "warning": NotifyType.WARNING, "failed": NotifyType.FAILURE}[worst]
        receiver = Apprise(asset=_asset())
        receiver.add(service)
        return _failure(name, receiver.notify(text, title, kind, body_format=NotifyFormat.TEXT))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what the libraries log of a delivery from the handlers of this process, also what a late worker logs.

    Warnings of apprise name tokens: its logs end in its results, for good. Debugging of HTTP names paths; records of
    others, in other threads, pass.
    """
    logging.getLogger("apprise").propagate = False
    sending = _SENDING.set(True)
    try:
        yield
    finally:
        _SENDING.reset(sending)


def _filter_http() -> None:
    """Filter at each logger, once a plug-in has imported the libraries: filters of a parent see no child's records."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _HTTP:
            logging.getLogger(name).addFilter(_of_others)  # a filter is added once


def _of_others(_: logging.LogRecord) -> bool:
    return not _SENDING.get()


def _failure(name: str, result: AppriseResult) -> DeliveryFailure | None:
    from apprise import AppriseResultStatus

    if result:
        return None
    if result.status is AppriseResultStatus.TIMEOUT:
        return DeliveryFailure(f"{name} did not answer within {TIMEOUT:g} s")
    told = " ".join(str(entry.message) for each in result for attempt in each.attempts for entry in attempt.logs)
    if (status := re.search(r"\berror=(\d{3})\b", told)) is None:
        return DeliveryFailure(f"{name} could not be reached")
    return DeliveryFailure(f"{name} answered {status[1]}", refused=int(status[1]) in NOT_TAKEN)


@cache
def _asset() -> AppriseAsset:
    """No redirects, which would send tokens to another party; no plug-ins and no files of the user's."""
    from apprise import AppriseAsset, PersistentStoreMode

    return AppriseAsset(
        app_id="Recourse",
        app_desc="Recourse",
        http_redirects=False,
        service_timeout=TIMEOUT,
        storage_mode=PersistentStoreMode.MEMORY,
        result_log_disk_size=0,
        plugin_paths=[],
    )
