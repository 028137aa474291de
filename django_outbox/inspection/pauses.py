"""Which names of event types, listeners and streams are known, so that a pause holds something."""

from __future__ import annotations

import difflib
from typing import Final

from django.utils.translation import gettext

from ..listeners import registry
from ..listeners.registry import qualified_name
from ..models import OutboxEvent, OutboxStream
from ..sql.values import CLOSING_KINDS

MAX_EVENTS: Final = 10_000  # newest events whose types are known


def _known_types(alias: str) -> set[str]:
    newest = OutboxEvent.objects.using(alias).order_by("-pk").values_list("event_type", flat=True)
    registered = (each for listener in registry.listeners() for each in listener.types)
    return {*newest[:MAX_EVENTS], *(each for each in registered if "*" not in each)}


def unknown_name(alias: str, kind: str, name: str) -> str | None:
    """Return why the name is not known: neither registered nor seen. It may still appear."""
    if kind == "stream":
        known = OutboxStream.objects.using(alias).filter(pk=name).exists()
        message = gettext("No event with the key %(name)r was written lately.")
        return None if known else message % {"name": name}
    if kind == "listener":
        found = registry.listeners()
        message = gettext("No listener %(name)r is registered here.")
        named = [each.title for each in found if name in (each.name, qualified_name(each.call))]
        return _fault_unless_known(name, [each.title for each in found], message, named)
    if kind in CLOSING_KINDS:  # pause_error() knows the queues
        return None
    message = gettext("No event type %(name)r is registered here or was seen lately.")
    return _fault_unless_known(name, sorted(_known_types(alias)), message)


def _fault_unless_known(
    name: str, known: list[str], message: str, near: list[str] | None = None
) -> str | None:
    if name in known:
        return None
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = [gettext("Did you mean %s?") % ", ".join(map(repr, near))] if near else []
    return " ".join([message % {"name": name}, *hint])
