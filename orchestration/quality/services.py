"""Delivery to services that apprise knows: Slack, Teams, PagerDuty, Opsgenie, mail with TLS, and a hundred others.

A URL of apprise holds the service's token. So a receiver is named by the service and a digest of the URL, and of a
failure only the kind and the HTTP status are told: what apprise logs may quote addresses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
_SEPARATOR = 2
"""Characters that apprise puts between title and text for a service without titles."""


def named(urls: Iterable[SecretStr]) -> dict[str, str]:
    """The URLs by names that may be shown, such as `slack 3fa2c1`; the same URL has the same name for ever."""
    texts = (url.get_secret_value() for url in urls)
    return {f"{text.partition('://')[0]} {sha256(text.encode()).hexdigest()[:6]}": text for text in texts}


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
    """Keep what the libraries log from the handlers of this process: warnings name tokens, debugging names paths."""
    loggers = [logging.getLogger(name) for name in ("apprise", "urllib3")]
    before = [logger.propagate for logger in loggers]
    try:
        for logger in loggers:
            logger.propagate = False
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate


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
