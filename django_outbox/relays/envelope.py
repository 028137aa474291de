"""What is sent of an event: the stored JSON as the body, the rest in headers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import timezone
from typing import Any
from urllib.parse import quote

from .. import hooks
from ..events import GLOBAL, Event
from ..exceptions import Unrecoverable
from ..queue_settings import RelaySettings
from .backend import Backend, Message

JSON_TYPE = "application/json"
STRUCTURED_TYPE = "application/cloudevents+json; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"  # what another SERIALIZER has written
# CloudEvents 1.0: names of attributes are lower-case letters and digits, at most 20.
# CloudEvents' HTTP binding, 3.1.3.2: of an attribute in a header, anything else is encoded.
VISIBLE = "".join(chr(each) for each in range(0x21, 0x7F) if chr(each) not in '"%')
TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # a header's name: RFC 9110, 5.6.2
EXTENSION = re.compile(r"[a-z0-9]{1,20}")
# Headers that not every event has, and the fields that they show.
OPTIONAL = (("aggregate-id", "aggregate_id"), ("tenant-id", "tenant_id"), ("event-key", "key"))
CORE = "specversion id source type subject time datacontenttype dataschema data".split()


def message_of(event: Event, settings: RelaySettings, backend: type[Backend]) -> Message:
    """Return what a relay sends; ``Unrecoverable`` if the event lacks a field that is needed."""
    text, is_json = event._payload_text or "", hooks.serializer() is hooks.JSON
    to = _filled("TO", settings, event, backend.quote)
    commands, content_type = backend.commands, JSON_TYPE if is_json else TEXT_TYPE
    headers = {
        name: value
        for name, value in event.headers.items()
        if commands is None or not commands.fullmatch(name)
    }
    body = text.encode()
    if settings.FORMAT == "plain":
        headers |= _plain(event)
    else:
        attributes = _attributes(event, _filled("SOURCE", settings, event, _quoted))
        if settings.FORMAT == "cloudevents":
            prefix = backend.attribute_prefix
            headers |= {f"{prefix}{name}": value for name, value in attributes.items()}
        else:
            body = _structured({**attributes, "datacontenttype": content_type}, text, is_json)
            content_type = STRUCTURED_TYPE
    return Message(
        to=to,
        body=body,
        content_type=content_type,
        headers=headers,
        event_id=event.event_id,
        event_type=event.event_type,
        key=event.key,
        group=event.key or event.aggregate_id,
        event=event,
    )


def headers_of(message: Message, mark: str) -> dict[str, str]:
    """Return the headers; with the content type if it is a CloudEvent, as its bindings have it."""
    if mark in message.headers or message.content_type == STRUCTURED_TYPE:
        return {**message.headers, "content-type": message.content_type}
    return {**message.headers}


def _filled(name: str, settings: RelaySettings, event: Event, quote: Any) -> str:
    template: str = getattr(settings, name)
    try:
        return template.format_map(_Fields(event, quote))
    except KeyError as error:
        raise Unrecoverable(
            f"The event has no {error.args[0]}, which {name} of the relay {settings.name!r} names."
        ) from None


def encoded(attribute: str) -> str:
    """Return an attribute of a CloudEvent as HTTP and NATS have it in a header."""
    return quote(attribute, safe=VISIBLE)


def expect_header(name: str, value: str, forbidden: re.Pattern[str]) -> None:
    """Raise ``Unrecoverable`` for a header that HTTP, or NATS after its example, cannot carry."""
    if not TOKEN.fullmatch(name) or forbidden.search(value):
        raise Unrecoverable(
            f"The header {name!r} cannot be sent: a name has ASCII letters, digits and hyphens, a "
            "value no line breaks or other control characters."
        )


def _quoted(value: str) -> str:
    """Return a field as it goes into a URI reference; a field may be a whole one."""
    return quote(value, safe="/:?#[]@!$&'()*+,;=")


class _Fields:
    """An event's fields for ``str.format_map``; ``KeyError`` names one that it lacks."""

    def __init__(self, owner: Any, quote: Callable[[str], str]) -> None:
        self._owner, self._quote = owner, quote

    def __getitem__(self, name: str) -> Any:
        if name == "headers":
            return _Headers(self._owner.headers, self._quote)
        return self._shown(name, getattr(self._owner, name))

    def _shown(self, name: str, value: Any) -> str:
        if value is None or value == "":
            raise KeyError(name)
        return self._quote(str(value))


class _Headers(_Fields):
    def __getitem__(self, name: str) -> str:
        return self._shown(f"header {name}", self._owner.get(name))


def _plain(event: Event) -> dict[str, str]:
    """Return the headers by which a consumer knows an event again, and what it is about."""
    found = {
        "event-id": event.event_id,  # the same at every delivery: drop what you have seen
        "event-type": event.event_type,
        "occurred-at": event.occurred_at.isoformat(),
    }
    if event.aggregate_type != GLOBAL:
        found["aggregate-type"] = event.aggregate_type
    for name, field in OPTIONAL:
        if value := getattr(event, field):
            found[name] = value
    return found


def _attributes(event: Event, source: str) -> dict[str, str]:
    """Return the attributes of a CloudEvent, its extensions included."""
    moment = event.occurred_at.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    found = {
        "specversion": "1.0",
        "id": event.event_id,
        "source": source,
        "type": event.event_type,
        "time": moment,
        "subject": event.aggregate_id,
        "partitionkey": event.key or event.aggregate_id,
        "tenantid": event.tenant_id,
    }
    extensions = {
        name: value
        for name, value in event.headers.items()
        if EXTENSION.fullmatch(name) and name not in CORE
    }
    return {name: value for name, value in {**extensions, **found}.items() if value}


def _structured(attributes: Mapping[str, str], text: str, is_json: bool) -> bytes:
    """Return the JSON of a CloudEvent; the stored text goes in as it is."""
    head = json.dumps(attributes, ensure_ascii=False, separators=(",", ":"))
    data = text if is_json else json.dumps(text, ensure_ascii=False)
    return f'{head[:-1]},"data":{data}}}'.encode()
