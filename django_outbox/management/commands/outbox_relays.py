"""``manage.py outbox_relays``: list the relays, and check that their brokers take messages."""

from __future__ import annotations

import json
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError, connections, router

from ...conf import current
from ...inspection.queues import queue_states
from ...inspection.relays import HELD_LIMIT, Held, RelayState, held_messages, relay_states
from ...inspection.workers import workers
from ...models import OutboxEvent, missing_table
from ...relay_settings import RelaySettings
from ...relays.relay import Relay
from ...sql import dialect_of
from ..arguments import add_databases, add_format, columns, positive_duration
from ..deadline import call_with_timeout
from ..examples import ExampleCommand

UNWELL, NO_ANSWER = 1, 2

States = dict[str, list[tuple[RelayState, Held | None]]]  # by alias
Faults = dict[str, str | None]  # by name of the relay; None: its broker takes messages


class Command(ExampleCommand):
    help = (
        'Lists the relays of OUTBOX["RELAYS"], and what waits for each. With --check it also '
        "connects to their brokers, sends nothing, and says what is wrong; the exit code is 0 if "
        "all is well, 1 if a broker does not take messages, 2 if the database gave no answer."
    )

    examples = {
        "": "list all relays",
        "--check": "connect to each broker before a deploy",
        "--check --relay orders --timeout 5s": "connect to one of them",
    }

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_databases(parser, "ask")
        add_format(parser)
        add = parser.add_argument
        add(
            "--relay",
            action="append",
            dest="relays",
            metavar="NAME",
            default=[],
            help="only this relay; may be repeated; default: all",
        )
        add("--check", action="store_true", help="connect to each broker, and send nothing")
        add(
            "--timeout",
            type=positive_duration,
            default=15.0,
            metavar="DURATION",
            help="how long to wait for the database, and for each broker (default: 15s)",
        )

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = _chosen(options["relays"])
        aliases = options["databases"] or [router.db_for_write(OutboxEvent)]
        states = {alias: _fetch(alias, options["timeout"]) for alias in dict.fromkeys(aliases)}
        faults = _faults(chosen, options["timeout"]) if options["check"] else {}
        if options["format"] == "json":
            self.stdout.write(json.dumps(_report(chosen, states, faults), indent=2))
        else:
            self.stdout.write("\n".join(_lines(chosen, states, faults)))
        if found := [f"{name}: {fault}" for name, fault in faults.items() if fault]:
            raise CommandError("\n".join(found), returncode=UNWELL)


def _chosen(names: list[str]) -> list[RelaySettings]:
    known = current().relays
    for name in names:
        if name not in known:
            expected = f"expected one of {', '.join(known)}" if known else "it is empty"
            raise CommandError(
                f'OUTBOX["RELAYS"] does not have {name!r}; {expected}.', returncode=NO_ANSWER
            )
    return [each for name, each in known.items() if not names or name in names]


def _fetch(alias: str, timeout: float) -> list[tuple[RelayState, Held | None]]:
    try:
        return call_with_timeout(timeout, _states, alias)
    except (DatabaseError, ImproperlyConfigured, TimeoutError) as error:
        raise CommandError(f"{alias}: {error}", returncode=NO_ANSWER) from error


def _states(alias: str) -> list[tuple[RelayState, Held | None]]:
    if missing := missing_table(alias):
        raise CommandError(missing, returncode=NO_ANSWER)
    connection = connections[alias]
    now = dialect_of(connection).clock(connection)
    states = relay_states(queue_states(alias, workers(alias, now)))
    return [(each, held_messages(alias, each.settings, now)) for each in states]


# -- checks of brokers -----------------------------------------------------------------------------


def _faults(chosen: list[RelaySettings], timeout: float) -> Faults:
    """Check all brokers at once; return what is wrong with each."""
    pending = {each.name: _begin(Relay(each)) for each in chosen}
    wait(pending.values(), timeout)
    return {name: _fault(result, timeout) for name, result in pending.items()}


def _begin(relay: Relay) -> Future[None]:
    result: Future[None] = Future()

    def run() -> None:
        try:
            relay.check()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)
        else:
            result.set_result(None)
        finally:
            relay.close()

    threading.Thread(target=run, name=f"outbox-check-{relay.settings.name}", daemon=True).start()
    return result


def _fault(result: Future[None], timeout: float) -> str | None:
    if not result.done():
        return f"no answer within {timeout:g} s"
    error = result.exception()
    return None if error is None else str(error) or type(error).__name__


# -- output ----------------------------------------------------------------------------------------


def _report(chosen: list[RelaySettings], states: States, faults: Faults) -> dict[str, Any]:
    return {each.name: _described(each, states, faults) for each in chosen}


def _described(settings: RelaySettings, states: States, faults: Faults) -> dict[str, Any]:
    found: dict[str, Any] = {
        "backend": settings.BACKEND,
        "events": [*settings.EVENTS],
        "to": settings.shown_to,
        "format": settings.FORMAT,
        "queue": settings.title,
        "databases": {alias: _state(each, held) for alias, each, held in _of(settings, states)},
    }
    if settings.name in faults:
        found["fault"] = faults[settings.name]
    return found


def _of(settings: RelaySettings, states: States) -> Iterator[tuple[str, RelayState, Held | None]]:
    for alias, rows in states.items():
        for each, held in rows:
            if each.settings.name == settings.name:
                yield alias, each, held


def _state(each: RelayState, held: Held | None) -> dict[str, Any]:
    queue = each.queue
    return {
        "waiting": queue.due,
        "oldest_due_age": None if queue.oldest_due_age is None else round(queue.oldest_due_age, 3),
        "workers": queue.workers,
        "paused": queue.is_paused,
        "away": queue.breaker
        and {"since": queue.breaker.paused_at.isoformat(), "reason": each.away_reason},
        "held": held and {"count": held.count, "age": round(held.age, 3), "reason": held.reason},
    }


def _lines(chosen: list[RelaySettings], states: States, faults: Faults) -> Iterator[str]:
    if not chosen:
        yield 'OUTBOX["RELAYS"] names no relay.'
        return
    titles = ("RELAY", "BACKEND", "EVENTS", "TO", "FORMAT", "QUEUE")
    rows = [
        (each.name, each.BACKEND, ", ".join(each.EVENTS), each.shown_to, each.FORMAT, each.title)
        for each in chosen
    ]
    yield from columns([titles, *rows])
    names = {each.name for each in chosen}
    for alias, found in states.items():
        yield ""
        yield f"[{alias}]"
        cells = [
            (each.settings.name, _waiting(each), _facts(each, held))
            for each, held in found
            if each.settings.name in names
        ]
        yield from columns([("RELAY", "WAITING", "STATE"), *cells])
    if faults:
        yield ""
        checked = [(name, fault or "ok") for name, fault in faults.items()]
        yield from columns([("RELAY", "BROKER"), *checked])


def _waiting(each: RelayState) -> str:
    age = each.queue.oldest_due_age
    more = "+" if each.queue.is_capped else ""
    return f"{each.queue.due}{more}" + ("" if age is None else f", the oldest for {age:.0f} s")


def _facts(each: RelayState, held: Held | None) -> str:
    queue, facts = each.queue, []
    if queue.breaker is not None:
        since = f"{queue.breaker.paused_at:%Y-%m-%d %H:%M:%S %Z}"
        facts.append(f"broker away since {since}: {each.away_reason}")
    if held is not None:
        more = "+" if held.count == HELD_LIMIT else ""
        facts.append(
            f"{held.count}{more} refused or deferred, for up to {held.age:.0f} s: {held.reason}"
        )
    if queue.is_paused:
        facts.append("paused")
    if queue.is_unserved:
        facts.append("no live worker serves it")
    return ", ".join(facts) or "ok"
