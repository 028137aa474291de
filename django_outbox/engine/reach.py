"""How far back looks at the table reach, and how often they may reach to its beginning.

What is settled leaves its entries in an index until no open snapshot can see them. A look from the
beginning walks over all of them: beside a snapshot of some minutes that alone kept workers busy.
"""

from __future__ import annotations

import time

from ..dialects.vocabulary import Claimed

MARGIN = 1.0  # seconds; what was due that long before a look began may commit after it
PART = 50.0  # a walk from the beginning is followed by a rest of that many times as long
LONGEST = 60.0  # seconds of such a rest


class Rest:
    """Holds one kind of work back to a small part of the time."""

    def __init__(self, part: float = PART) -> None:
        """``part``: a rest is that many times as long as the work; 0: none."""
        self._part = part
        self._last = 0.0  # seconds
        self.until = 0.0  # monotonic

    def after(self, started: float) -> None:
        """Rest from work that began at ``started`` (monotonic), and ends now.

        It counts as long as the shorter of the last two: one may have waited for a connection.
        """
        ended = time.monotonic()
        took, self._last = min(ended - started, self._last), ended - started
        self.until = ended + min(self._part * took, LONGEST)


class Reach:
    """Has each claim begin where the one before it ended, but for a walk now and then.

    Only such a walk finds what committed late, or was locked when it was passed. One thread only.
    """

    def __init__(self, *, margin: float = 0.0, part: float = PART) -> None:
        """``margin``: seconds for which a claim leaves due rows alone; ``part`` as of ``Rest``."""
        self._margin = MARGIN + margin
        self._low = self._started = 0.0  # monotonic; from when on due rows are looked for
        self.rest = Rest(part)  # from walks
        self.whole = True  # the last claim was a walk

    def back(self, *, walk: bool = True) -> float | None:
        """Begin a claim: return the seconds it has to reach back; None: to the beginning."""
        self._started = time.monotonic()
        self.whole = walk and self._started >= self.rest.until
        return None if self.whole else self._started - self._low

    def note(self, found: Claimed, *, skipped: bool = False) -> None:
        """End it: note what it found, all that was due or the first of it; or skipped some."""
        if not skipped:
            self._low = self._started - (found.waited if found.more else 0.0) - self._margin
        if self.whole:
            self.rest.after(self._started)
