"""Run listeners in the language and time zone that were active when the event was written.

Add ``remember`` to ``OUTBOX["CONTEXT_PROVIDERS"]`` and ``restore`` to ``OUTBOX["INTERCEPTORS"]``.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django.utils import timezone, translation

from ..events import Event

LANGUAGE, ZONE = "language", "timezone"  # names of headers


def remember() -> dict[str, str]:
    """Return the current language, and the time zone if it has a name, as headers.

    Example::

        with translation.override("de"):
            assert locale.remember()["language"] == "de"
    """
    found = {
        LANGUAGE: translation.get_language(),
        ZONE: getattr(timezone.get_current_timezone(), "key", None),
    }
    return {name: value for name, value in found.items() if value}


@contextmanager
def restore(event: Event) -> Iterator[None]:
    """Activate the headers' language and time zone during a call; ignore unknown ones.

    Example::

        event = outbox.Event(event_type="order.placed", headers={"language": "de"})
        with locale.restore(event):
            assert translation.get_language() == "de"
    """
    language, zone = event.headers.get(LANGUAGE, ""), event.headers.get(ZONE, "")
    with ExitStack() as stack:
        if translation.check_for_language(language):
            stack.enter_context(translation.override(language))
        if (found := _zone(zone)) is not None:
            stack.enter_context(timezone.override(found))
        yield


def _zone(name: str) -> zoneinfo.ZoneInfo | None:
    try:
        return zoneinfo.ZoneInfo(name) if name else None
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return None
