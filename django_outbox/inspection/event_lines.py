"""An event as one line of JSON, as commands print it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder

from ..models import OutboxEvent

JSON_COLUMNS: Final = ("payload", "headers")  # written as the JSON that is stored


def columns_of(event: OutboxEvent) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each column that has one; of the status, its name."""
    for field in event._meta.concrete_fields:
        value = getattr(event, field.attname)
        if field.name == "status":
            value = OutboxEvent.Status(value).name
        if value is not None:
            yield field.name, value


def as_json(columns: Mapping[str, Any]) -> str:
    """Return columns as one line; a payload that is not JSON becomes a JSON string."""
    texts = [
        f"{json.dumps(name)}: {_json_text(str(columns[name]))}"
        for name in JSON_COLUMNS
        if name in columns
    ]
    others = {name: each for name, each in columns.items() if name not in JSON_COLUMNS}
    rest = json.dumps(others, cls=DjangoJSONEncoder, ensure_ascii=False)
    return f"{rest[:-1]}, {', '.join(texts)}}}"


def _json_text(text: str) -> str:
    """Return JSON text on one line, unchanged otherwise; other text as a JSON string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text)
    return text.replace("\r", " ").replace("\n", " ")  # others may be in a string
