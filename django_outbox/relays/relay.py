"""``Relay``: a batch listener that sends events to a broker; those of the settings, registered."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .. import conf, hooks
from ..conf import current, imported, is_test_run
from ..events import Event
from ..exceptions import BrokerUnavailable, Unrecoverable
from ..listeners import registry
from ..listeners.options import Batching
from ..listeners.outcomes import Dead, Defer
from ..listeners.registry import ANY, Listener
from ..queue_settings import RelaySettings
from ..redaction import Redaction
from ..signals import announce, relay_published
from .backend import Backend, Message, Outcome, is_refusal
from .envelope import message_of
from .session import OPEN_TIMEOUT, Session

logger = logging.getLogger("django_outbox")

LOG_INTERVAL = 60.0  # seconds between two lines with the same reason
MAX_REASONS = 1000  # that are remembered for that
REASON_LENGTH = 200  # characters in the log


def backend_class(settings: RelaySettings) -> type[Backend]:
    """Return the class that ``BACKEND`` names; ``ImproperlyConfigured`` says why there is none."""
    where = settings.where("BACKEND")
    found = imported(where, settings.BACKEND)
    if not isinstance(found, type) or not issubclass(found, Backend):
        raise ImproperlyConfigured(
            f"{where} names {found!r}; expected a subclass of django_outbox.relays.Backend."
        )
    return found


def missing_client(path: str, error: ImproperlyConfigured) -> bool:
    """Return whether what a backend imports is not installed, rather than its path being wrong."""
    cause, module = error.__cause__, path.rpartition(".")[0]
    name = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else ""
    return bool(name) and not f"{module}.".startswith(f"{name}.")


class CheckFailed(Exception):
    """A broker that can be connected to did not pass its check."""


class Relay:
    """Sends the events of one relay; the callable that is registered as its batch listener."""

    find_class: ClassVar[Any] = None  # of a test, in place of backend_class: testing/relayed.py

    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self._redaction = Redaction(settings.OPTIONS, settings.TO)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._logged_at: dict[str, float] = {}  # monotonic, by reason

    @property
    def backend_class(self) -> type[Backend]:
        """The class that ``BACKEND`` names; ``ImproperlyConfigured`` says why there is none."""
        found: type[Backend] = (self.find_class or backend_class)(self.settings)
        return found

    def new_backend(self) -> Backend:
        """Return a new backend, not opened; ``ImproperlyConfigured`` if it refuses its options."""
        with self._redacted():
            try:
                backend = self.backend_class(**self.settings.OPTIONS)
            except (TypeError, ValueError) as error:
                where = self.settings.where("OPTIONS")
                raise ImproperlyConfigured(f"{where}: {error}") from error
        backend.to = self.settings.TO
        return backend

    def __call__(self, events: list[Event]) -> list[Outcome]:
        """Send events; return an outcome for each. In a test run that captures nothing, all fail.

        Raises ``BrokerUnavailable`` if none of them was confirmed and the broker refused none, or
        if the settings name no backend: no event dies of a client that is not installed.
        """
        if self.find_class is None and is_test_run():
            said = (
                f"The relay {self.settings.name!r} sends nothing in a test run. Deliver within "
                "capture_relayed() of django_outbox.testing; or within send_relayed(), if the test "
                "has a broker."
            )
            return [Unrecoverable(said) for _ in events]
        try:
            with self._redacted():
                return self._send(events)
        except ImproperlyConfigured as error:
            raise BrokerUnavailable(str(error)) from error

    def _send(self, events: list[Event]) -> list[Outcome]:
        """Make and publish messages, and report how many the broker took, refused and deferred."""
        began, backend = monotonic(), self.backend_class
        messages: list[Message] = []
        found: dict[str, Outcome] = {}
        for event in events:
            try:
                messages.append(message_of(event, self.settings, backend))
            except Exception as error:  # noqa: BLE001 - of this event alone
                found[event.event_id] = error
        try:
            if messages:
                with self._open_session() as session:
                    answers = session.publish(messages, monotonic() + session.backend.timeout)
                for message, answer in zip(messages, answers, strict=True):
                    found[message.event_id] = self._shown(message, answer)
        finally:
            announce(
                relay_published,
                sender=events[0].database,
                relay=self.settings.name,
                published=sum(each is None for each in found.values()),
                refused=sum(map(is_refusal, found.values())),
                deferred=sum(map(is_deferral, found.values())),
                duration=monotonic() - began,
            )
        self._log(found.values())
        return [found[event.event_id] for event in events]

    def check(self) -> None:
        """Ask the backend whether the broker takes messages; raise what is wrong.

        Raises ``CheckFailed`` if there is a connection, so that an event may get through.
        """
        with self._redacted():
            session = self._open_session()
            try:
                with session:
                    session.run(session.backend.check, timeout=OPEN_TIMEOUT)
            except Exception as error:
                raise CheckFailed(str(error) or type(error).__name__) from error

    @contextmanager
    def _redacted(self) -> Iterator[None]:
        """Raise what the backend and its client raise without the secrets of the settings."""
        try:
            yield
        except Exception as error:
            shown = self._redaction.error(error)
            if shown is error:
                raise
            raise shown from None

    def _shown(self, message: Message, outcome: Outcome) -> Outcome:
        """Return an outcome without the secrets of the settings and of the message's own URL."""
        if outcome is None:
            return None
        own = (Redaction({}, message.to),) if "://" in message.to else ()
        for secrets in (self._redaction, *own):
            if isinstance(outcome, BaseException):
                outcome = secrets.error(outcome)
            elif isinstance(outcome, (Dead, Defer)):
                outcome = replace(outcome, reason=secrets.text(outcome.reason))
        return outcome

    def _log(self, outcomes: Iterable[Outcome]) -> None:
        """Log why messages are refused or deferred; each reason once in ``LOG_INTERVAL``."""
        now = monotonic()
        for outcome in filter(lambda each: is_refusal(each) or is_deferral(each), outcomes):
            reason = _reason(outcome)
            if now < self._logged_at.get(reason, -inf) + LOG_INTERVAL:
                continue
            if len(self._logged_at) >= MAX_REASONS:
                self._logged_at.clear()
            self._logged_at[reason] = now
            if is_refusal(outcome):
                logger.warning("message refused relay=%s reason=%s", self.settings.name, reason)
            else:
                logger.warning("message deferred relay=%s reason=%s", self.settings.name, reason)

    def close(self) -> None:
        """Close the connection; the next event opens another."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None and session.is_ours:
            session.retire()

    def _open_session(self) -> Session:
        with self._lock:
            session, self._session = self._session, None
            if session is None or not session.is_ours or session.failed:
                if session is not None and session.is_ours:
                    session.retire()
                backend = self.new_backend()
                # A lease is renewed every third of LEASE, so half of it lies inside the lease.
                backend.timeout = min(backend.timeout, current().LEASE / 2)
                session = Session(backend)
                session.open()
            self._session = session
            session.enter()
            return session


def is_deferral(outcome: Outcome) -> bool:
    """Return whether a message waits for something that a person should know of."""
    return isinstance(outcome, Defer) and bool(outcome.reason)


def _reason(outcome: Outcome) -> str:
    name = type(outcome).__name__
    if isinstance(outcome, (Dead, Defer)):
        return outcome.reason.partition("\n")[0][:REASON_LENGTH].strip() or name
    return f"{name}: {outcome}".partition("\n")[0][:REASON_LENGTH]


# --- registration ---------------------------------------------------------------------------------


def register() -> None:
    """Register the relays that the settings name, in place of those registered before."""
    for each in relays():
        registry.remove(each)
        each.close()
    for settings in current().relays.values():
        registry.add(_listener(Relay(settings)))


def relays() -> list[Relay]:
    """Return the registered relays in the order of the settings."""
    return [each.call for each in registry.listeners() if isinstance(each.call, Relay)]


@atexit.register
def _close() -> None:
    for each in relays():
        each.close()


def _listener(relay: Relay) -> Listener:
    settings, per_key, retry = relay.settings, 1, None
    with suppress(ImproperlyConfigured):  # a check reports it; events wait, or are written anyway
        per_key = relay.backend_class.per_key
    with suppress(ImproperlyConfigured):
        if settings.RETRY is not None:
            retry = hooks.retry_from(settings.RETRY, settings.where("RETRY"))
    return Listener(
        call=relay,
        event_type=", ".join(settings.EVENTS),
        patterns=settings.EVENTS,
        aggregate_type=ANY,
        name=settings.title,
        retry=retry,
        timeout=None,
        atomic=False,
        queue=settings.title,
        batching=Batching(settings.BATCH, settings.WITHIN, min(per_key, settings.BATCH)),
        check=relay.check,
    )


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX" and not conf.problems():
        register()


# After conf's own receiver, which was connected before it, has forgotten the former settings.
setting_changed.connect(_reset, dispatch_uid="django_outbox.relays")
