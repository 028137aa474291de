"""How far back looks at the table reach, and how often they may reach to its beginning.

What is settled leaves its entries in an index until no open snapshot can see them. A look from the
beginning walks over all of them: beside a snapshot of some minutes that alone kept workers busy.
"""

from __future__ import annotations

import random
import time
from math import inf

from ..dialects.vocabulary import Claimed

MARGIN = 1.0  # seconds; what was due that long before a look began may commit after it
PART = 50.0  # a walk from the beginning is followed by a rest of that many times as long
LONGEST = 300.0  # seconds of such a rest


class Rest:
    """Holds one kind of work back to a small part of the time."""

    def __init__(self, part: float = PART) -> None:
        """``part``: a rest is about that many times as long as the work; 0: none."""
        self._part = part
        self._last = 0.0  # seconds
        self.until = 0.0  # monotonic

    def after(self, started: float) -> None:
        """Rest from work that began at ``started`` (monotonic), and ends now.

        It counts as long as the shorter of the last two: one may have waited for a connection.
        Workers are not to rest and work in step, so a rest is a little longer or shorter.
        """
        ended = time.monotonic()
        took, self._last = min(ended - started, self._last), ended - started
        self.until = ended + min(self._part * took, LONGEST) * random.uniform(0.8, 1.2)


class Reach:
    """Has each claim begin where the one before it ended. One thread only.

    What lies before that committed late, or was locked when it was passed. Only a walk from the
    beginning finds it.
    """

    def __init__(self, *, margin: float = 0.0) -> None:
        """``margin``: seconds for which a claim leaves due rows alone."""
        self._margin = MARGIN + margin
        self._low = self._started = 0.0  # monotonic; from when on due rows are looked for

    def begin(self, started: float, waited: float) -> None:
        """Begin with what had been due for ``waited`` seconds when a walk ``started``."""
        self._low = started - waited - self._margin

    def back(self) -> float | None:
        """Start a claim: return the seconds it has to reach back; None: to the beginning."""
        self._started = time.monotonic()
        return self._started - self._low

    def note(self, found: Claimed, *, skipped: bool = False) -> None:
        """End it: note what it found, all that was due or the first of it; or skipped some."""
        if not skipped:
            self.begin(self._started, found.waited if found.more else 0.0)


class Walks(Reach):
    """A reach whose claims are walks themselves, now and then."""

    def __init__(self, *, part: float = PART) -> None:
        """``part`` as of ``Rest``; 0: each is."""
        super().__init__()
        self._rest = Rest(part)
        self._walked = True  # by the last claim

    def back(self) -> float | None:
        back = super().back()
        self._walked = self._started >= self._rest.until
        return None if self._walked else back

    def note(self, found: Claimed, *, skipped: bool = False) -> None:
        super().note(found, skipped=skipped)
        if self._walked:
            self._rest.after(self._started)

    def again(self) -> float:
        """Return when (monotonic) what the last claim did not reach can be: inf, if it did."""
        return inf if self._walked else self._rest.until
