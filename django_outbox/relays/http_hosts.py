"""Which receivers of webhooks are away: a circuit breaker for each host and port.

A host is away after a connection error, a 503 or an answer that did not come. Nothing is sent to it
for a pause; then one message tries whether it is back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

MIN_PAUSE: Final = 3.0  # seconds
MAX_PAUSE: Final = 60.0  # seconds; a receiver's Retry-After counts up to this
# The pause is this share of the time that the host has been away. A short outage ends promptly; a
# host that has been away for hours is asked, and its events are put off, once a minute.
SHARE: Final = 1 / 20
MAX_HOSTS: Final = 1000  # remembered; URLs may come from customers


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Since when a host has been away, and when it may be tried again."""

    reason: str  # shown with the breaker and in logs
    since: float  # time.monotonic
    until: float  # time.monotonic
    is_unreachable: bool  # it does not accept connections, so one that it accepts ends this
    is_probed: bool = False  # a message is on its way to it


class Hosts:
    """The hosts that are away. All threads of a process share one; each method is atomic enough.

    Two threads that write at once leave one of two right answers.
    """

    def __init__(self) -> None:
        self._absences: dict[str, Absence] = {}

    def absence(self, host: str) -> Absence | None:
        """Return why nothing must be sent to a host at present; None: send."""
        found = self._absences.get(host)
        return found if found is not None and monotonic() < found.until else None

    def latest(self, host: str) -> Absence | None:
        """Return a host's absence, even if it may be tried again."""
        return self._absences.get(host)

    def begin_probe(self, host: str, until: float) -> None:
        """Let nothing else be sent to a host that may be tried again, while one message tries."""
        if found := self._absences.get(host):
            self._absences[host] = replace(found, until=until, is_probed=True)

    def set_away(
        self, host: str, reason: str, *, is_unreachable: bool, retry_after: float = 0.0
    ) -> Absence:
        """Remember that a host is away; ``retry_after`` is what it has asked for, in seconds."""
        now, former = monotonic(), self._absences.pop(host, None)
        since = former.since if former else now
        pause = min(max(retry_after, (now - since) * SHARE, MIN_PAUSE), MAX_PAUSE)
        if len(self._absences) >= MAX_HOSTS:
            self._absences.pop(next(iter(self._absences)), None)
        absence = Absence(
            reason=reason, since=since, until=now + pause, is_unreachable=is_unreachable
        )
        self._absences[host] = absence
        return absence

    def set_back(self, host: str) -> None:
        """Forget that a host was away: it has answered."""
        self._absences.pop(host, None)

    def clear(self) -> None:
        """Forget all hosts."""
        self._absences.clear()


# Of the process: it outlives backends, which are made anew after each BrokerUnavailable.
hosts: Final = Hosts()
