"""Twenty questions of new readers: the index links to the page with the answer, under a heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.rules import Rule, Text

CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")

# The question, the page, its heading, and a phrase of the answer below that heading.
QUESTIONS = {
    "Can an event get lost if the process dies right after the commit?": (
        "explanation/guarantees.md",
        "At-least-once delivery",
        "After the COMMIT it is as safe as your order.",
    ),
    "A listener ran twice and charged a customer twice. How do I prevent that?": (
        "explanation/guarantees.md",
        "Idempotent listeners",
        "Pass `event.event_id` as the idempotency key of the call",
    ),
    "How do I keep the events of one customer in order?": (
        "how-to/deliver-in-order.md",
        "Deliver in order",
        "Events with the same key are delivered one after the other",
    ),
    "What happens to running listeners during a deploy?": (
        "how-to/go-to-production.md",
        "Stopping",
        "running listeners may finish within `DRAIN_TIMEOUT`",
    ),
    "Why is an event late?": (
        "how-to/tune.md",
        "Find out why events are late",
        "threads wait for the service that they call",
    ),
    "How do I see why an event failed, and send it again?": (
        "how-to/replay-dead-events.md",
        "In the admin",
        "the error with the end of its traceback",
    ),
    "How often is a failing listener called?": (
        "how-to/listen.md",
        "Retries",
        "twenty executions in about an hour and a half",
    ),
    "How do I test that my view writes an event?": (
        "how-to/testing.md",
        "Assert what was written",
        'assert_event_written("order.placed", payload={"sku": "teapot"}, aggregate=order)',
    ),
    "How many worker processes and threads do I need?": (
        "how-to/go-to-production.md",
        "Scaling",
        "Start with one worker process, then add what you run out of",
    ),
    "How do I deliver events while I develop?": (
        "how-to/go-to-production.md",
        "Run it during development",
        "outbox_worker --reload",
    ),
    "Who wakes me up when nothing is delivered?": (
        "how-to/monitor.md",
        "Alerts",
        "no worker is alive, so nothing is delivered",
    ),
    "One slow API delays all other listeners. What can I do?": (
        "how-to/separate-slow-listeners.md",
        "Queues: keep slow listeners apart",
        "Give the slow listener its own queue.",
    ),
    "A partner is down for hours. Do my events die?": (
        "how-to/survive-a-partners-outage.md",
        "Circuit breakers: survive a partner's outage",
        "The events wait in the table and lose no attempts.",
    ),
    "How do I stop the delivery of one event type right now?": (
        "how-to/pause-delivery.md",
        "From the shell",
        "manage.py outbox_pause --event-type parcel.requested",
    ),
    "How do I send an event later, such as a reminder?": (
        "how-to/write-events.md",
        "Delayed events",
        "deliver_after=timedelta(hours=24)",
    ),
    "Does the table grow forever?": (
        "how-to/tune.md",
        "Retention",
        "The purge deletes events that finished longer than `RETENTION_DONE` (7 days) ago",
    ),
    "A customer asks us to delete their data. What about the events?": (
        "explanation/security.md",
        "Erase on request",
        "You may delete finished events whenever you like.",
    ),
    "How do I rename an event type while old events wait?": (
        "how-to/type-events.md",
        "Rename a type",
        "List the former names, and those events are still delivered",
    ),
    "How many database connections does a worker open?": (
        "how-to/go-to-production.md",
        "Database connections",
        "a worker process opens, with the default doorbell",
    ),
    "What is delivered again after I restore a backup?": (
        "how-to/go-to-production.md",
        "Backup and restore",
        "Those delivered since are delivered again, with the same `event_id`.",
    ),
}


def questions_are_answered(root: Path) -> Iterator[str]:
    """One click leads from the index to the page, and one to the heading."""
    index = Text.read(root, "docs/index.md")
    for question, (path, title, phrase) in QUESTIONS.items():
        if f"]({path})" not in index.text:
            yield index.fault(0, f"no link to {path}, which answers {question!r}; add it")
        if not (root / "docs" / path).is_file():
            continue
        page = Text.read(root, f"docs/{path}")
        position, below = answer(page.text, title)
        if phrase not in as_read(below):
            yield page.fault(
                position, f"no {phrase!r} below {title!r}; it answers {question!r}: restore it"
            )


def as_read(text: str) -> str:
    """Return a text without links, bold type and line breaks."""
    return " ".join(LINK.sub(r"\1", text).replace("**", "").split())


def answer(text: str, title: str) -> tuple[int, str]:
    """Return the place of a heading, and what is below it up to the next one.

    A comment in a code block is not a heading.
    """
    outside = CODE.sub(lambda found: " " * len(found[0]), text)
    headings = [*re.finditer(r"^#+ (.+)$", outside, re.MULTILINE)]
    places = [number for number, found in enumerate(headings) if found[1] == title]
    if len(places) != 1:
        return 0, ""
    found, *after = headings[places[0] :]
    return found.start(), text[found.end() : after[0].start() if after else None]


RULES: list[Rule] = [questions_are_answered]
