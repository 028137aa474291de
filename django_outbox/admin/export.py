"""Export of the listed events as CSV or JSON lines, streamed page by page; REDACT applies."""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils import timezone

from ..conf import current
from ..inspection.event_lines import as_json, columns_of
from ..models import OutboxEvent
from . import redaction

PAGE_SIZE: Final = 200  # events per query; only so many are in memory at once
COLUMNS: Final = [each.name for each in OutboxEvent._meta.concrete_fields]
JSON_TEXTS: Final = ("payload", "headers", "result", "progress")
# A spreadsheet takes text that begins with one of these for a formula, also in its wide form.
FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", *"\uff1d\uff0b\uff0d\uff20")


@dataclass(frozen=True, slots=True)
class Format:
    """A format of the export: its media type, a heading, and the line of an event."""

    content_type: str
    heading: str
    line: Callable[[dict[str, Any]], str]


def respond(request: HttpRequest, rows: Any, format_name: str) -> StreamingHttpResponse:
    """Return a download of these events, newest first."""
    chosen = FORMATS[format_name]
    texts = _texts(rows, chosen)
    # Under ASGI, Django would read all of a synchronous iterator before it sends the first byte.
    content: Any = _in_threads(texts) if isinstance(request, ASGIRequest) else texts
    now = timezone.localtime(timezone.now()).strftime("%Y-%m-%d-%H%M%S")
    return StreamingHttpResponse(
        content,
        content_type=chosen.content_type,
        headers={
            "Content-Disposition": f'attachment; filename="outbox-events-{now}.{format_name}"',
            "X-Content-Type-Options": "nosniff",
        },
    )


def _texts(rows: Any, chosen: Format) -> Iterator[str]:
    """Yield the heading and the text of each page; each page is a query of its own."""
    yield chosen.heading
    rows = rest = rows.order_by("-pk")
    while page := [*rest[:PAGE_SIZE]]:
        yield "".join(chosen.line(dict(_shown(each))) for each in page)
        rest = rows.filter(pk__lt=page[-1].pk)


async def _in_threads(texts: Iterator[str]) -> AsyncIterator[str]:
    """Yield the same texts; each query runs in the thread that has the request's connection."""
    read = sync_to_async(lambda: next(texts, None))
    while (text := await read()) is not None:
        yield text


def _shown(event: OutboxEvent) -> Iterator[tuple[str, Any]]:
    """Yield the columns of an event with REDACT applied."""
    for name, value in columns_of(event):
        if name in JSON_TEXTS and current().REDACT:
            yield name, _hidden(value)
        elif name == "last_error":
            yield name, redaction.hide_in_text(value)
        else:
            yield name, value


def _hidden(text: str) -> str:
    try:
        return redaction.dump(_hide_errors(redaction.hide(redaction.parse(text))))
    except (ValueError, RecursionError):  # not JSON: hidden values cannot be found in it
        return redaction.MASK


def _hide_errors(value: Any, name: str = "") -> Any:
    """Hide values in the errors of an event's progress, which are plain text."""
    if isinstance(value, redaction.Pairs):
        return redaction.Pairs((key, _hide_errors(each, key)) for key, each in value)
    return redaction.hide_in_text(value) if name == "error" and isinstance(value, str) else value


def _csv_line(columns: dict[str, Any]) -> str:
    return _csv_row([_safe_cell(columns.get(name, "")) for name in COLUMNS])


def _csv_row(cells: list[Any]) -> str:
    buffer = StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerow(cells)
    return buffer.getvalue()


def _safe_cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet takes for a formula."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    is_formula = isinstance(value, str) and value.lstrip(" ").startswith(FORMULA_STARTS)
    return f"'{value}" if is_formula else value


FORMATS: Final = {
    "csv": Format("text/csv; charset=utf-8", _csv_row(COLUMNS), _csv_line),
    "jsonl": Format("application/x-ndjson", "", lambda columns: f"{as_json(columns)}\n"),
}
