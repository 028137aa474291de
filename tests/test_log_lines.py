"""Log lines: their words and fields, the JSON format, and what they must not contain."""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import django_outbox as outbox
from django_outbox.contrib import logs
from django_outbox.contrib.prometheus.receivers import Receivers
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import listening, statuses, write
from tests.waiting import wait_until


def line(text: str, *arguments: object, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord(
        "django_outbox", logging.WARNING, __file__, 1, text, arguments, more.get("exc_info")
    )
    return dict(json.loads(logs.JSONFormatter().format(record)))


# -- JSON ------------------------------------------------------------------------------------------


def test_a_line_is_one_json_object_with_its_fields() -> None:
    found = line("rescued event_id=%s event_type=%s rescues=%d", "01A", "order.placed", 2)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "WARNING",
        "logger": "django_outbox",
        "event": "rescued",
        "event_id": "01A",
        "event_type": "order.placed",
        "rescues": 2,
    }


@pytest.mark.parametrize(
    ("text", "arguments", "event"),
    [
        ("nothing to fill in, 100 %", (), "nothing to fill in, 100 %"),
        ("%s of %s", (1, 2), "1 of 2"),
        ("%d %% of key=%s", (5, "x"), "5 % of key=x"),
        ("by name %(name)s", ({"name": "x"},), "by name x"),
    ],
    ids=["plain", "without names", "some without", "mapping"],
)
def test_a_line_without_fields_is_kept_whole(text: str, arguments: Any, event: str) -> None:
    found = line(text, *arguments)
    assert found["event"] == event
    assert set(found) == {"time", "level", "logger", "event"}


def test_a_line_break_or_a_quote_in_a_value_makes_no_second_line() -> None:
    text = 'a"b\nlevel=FORGED'
    found = line("retry event_id=%s error=%s", "01A", text)
    assert found["error"] == text


def test_the_context_and_the_traceback_are_members() -> None:
    try:
        raise LookupError("no such shelf")
    except LookupError:
        error = sys.exc_info()
    with logs.context(request="r1"):
        found = line("delivery failed event_id=%s", "01A", exc_info=error)
    assert found["request"] == "r1"
    assert found["exception"].endswith("LookupError: no such shelf")


# -- the page --------------------------------------------------------------------------------------

PACKAGE = Path(outbox.__file__).parent
LEVELS = {"exception": "ERROR", "log": ""}  # `log` takes the level of the outcome
OUTCOMES = {
    "done": "DEBUG",
    "deferred": "INFO",
    "dead": "ERROR",
    "lost": "INFO",
    "discarded": "WARNING",
}

Told = tuple[str, str, tuple[str, ...]]  # level, words, names of the values


def parted(level: str, text: str) -> list[Told]:
    """Split the text of a log call into words and names; a leading ``%s`` is the subject."""
    found = [match for match in logs.FIELD.finditer(text) if match[0] != "%%"]
    named = [match for match in found if match["name"]]
    words = (text[: named[0].start()] if named else text).strip()
    names = tuple(match["name"] for match in named)
    assert words.count("%") <= 1, f"a value without a name: {text}"
    if words == "%s":
        return [(level, outcome, names) for outcome, level in OUTCOMES.items()]
    return [(level or "WARNING", words.replace("%s", "…"), names)]


def errors_of(nodes: list[Any]) -> set[str]:
    """Return the names of exceptions in a module: handled ones, and arguments of such a type."""
    given = [each for each in nodes if isinstance(each, ast.arg) and each.annotation]
    found = {each.arg for each in given if re.search("Err|Exc", ast.unparse(each.annotation))}
    return found | {each.name for each in nodes if isinstance(each, ast.ExceptHandler)}


def calls() -> Iterator[tuple[str, list[ast.expr], set[str]]]:
    """Yield every log call of the package: its level, its arguments, names of exceptions there."""
    for path in PACKAGE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        errors = errors_of(nodes)
        for node in nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of, method = getattr(node.func.value, "id", ""), node.func.attr
            if of == "logger" and method in (*LEVELS, "debug", "info", "warning", "error"):
                level = LEVELS.get(method, method.upper())
                yield level, node.args[method == "log" :], errors


def logged() -> set[Told]:
    found: set[Told] = set()
    for level, (text, *_), _ in calls():
        texts = [each.value for each in ast.walk(text) if isinstance(each, ast.Constant)]
        assert texts, f"a log call without a text of its own: {ast.unparse(text)}"
        for each in texts:
            if isinstance(each, str):
                found.update(parted(level, each))
    return found


def test_every_line_is_on_the_page_and_no_other() -> None:
    row = re.compile(r"^\| (\w+) \| `([^`]+)`[^|]*\| (.*?) ?\|$", re.MULTILINE)
    page = (samples.DOCS / "reference" / "logs.md").read_text()
    told = {
        (level, words, tuple(re.findall(r"`(\w+)`", values)))
        for level, words, values in row.findall(page)
        if level != "level"
    }
    assert told == logged()


def test_no_error_is_logged_whole_as_it_may_be_empty_or_of_several_lines() -> None:
    """Expected ``first_line(error)``, or its class, in place of ``error`` or ``errors[0]``."""
    given = [(ast.unparse(each), errors) for _, some, errors in calls() for each in some]
    assert [text for text, errors in given if re.split(r"\W", text)[0] in errors] == []


def test_no_line_names_what_is_in_an_event() -> None:
    names = {name for _, _, names in logged() for name in names}
    assert names & {"payload", "headers", "key", "unique_key", "tenant_id", "aggregate_id"} == set()


# -- what is not logged ----------------------------------------------------------------------------

SECRET = "canary-4711"


def failing(event: outbox.Event) -> None:
    raise LookupError(SECRET)


async def failing_later(event: outbox.Event) -> None:
    raise LookupError(SECRET)


def giving_up(event: outbox.Event) -> outbox.Dead:
    return outbox.Dead(SECRET)


def secretive(count: int = 1) -> None:
    write(
        count,
        payload={"card": SECRET},
        headers={"who": SECRET},
        aggregate_id=SECRET,
        tenant_id=SECRET,
    )


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("where", ["drain", "worker"])
@pytest.mark.parametrize(
    "listener", [failing, failing_later, giving_up], ids=["plain", "async", "dead"]
)
def test_435_a_secret_is_in_no_line_and_no_metric(
    listener: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Payload, headers, ids and the error's text stay out; only the table stores the latter."""
    shown_by = CollectorRegistry()
    counted = Receivers("outbox", shown_by)
    counted.connect()
    retry = outbox.Fixed(0, max_attempts=2)
    try:
        with caplog.at_level(logging.INFO, "django_outbox"), listening(listener, retry=retry):
            secretive()
            deliver_all(where)
        shown = generate_latest(shown_by).decode()
    finally:
        counted.disconnect()
    lines = [logs.JSONFormatter().format(each) for each in caplog.records]
    kind = "Dead" if listener is giving_up else "LookupError"
    assert any(f'"error":"{kind}"' in each for each in lines)
    assert [each for each in lines if SECRET in each] == []
    assert SECRET not in shown
    assert 'outcome="dead"' in shown
    assert SECRET in (OutboxEvent.objects.get().last_error or "")


def deliver_all(where: str) -> None:
    if where == "drain":
        for _ in range(2):
            outbox.drain()
    else:
        with outbox.Worker():
            wait_until(lambda: statuses() == {"DEAD": 1}, what="the dead event")
    assert statuses() == {"DEAD": 1}
