"""Rolling deploys that change the listeners: both releases write and deliver side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario

TYPES = "fault.rolled.*"  # what the listeners listen to: a type for each deploy and release
AUDIT = f"{TYPES} audit"  # only workers know it
ALWAYS = (TYPES, f"{TYPES} ledger", AUDIT)
MAIL, LETTERS = f"{TYPES} mail", f"{TYPES} letters"  # the listener that changes, by its titles


@dataclass(frozen=True, kw_only=True)
class Release:
    """What the processes of a release know of the listener that changes, and who routes."""

    change: str  # that it brings
    changing: Mapping[str, Any] | None  # the options of that listener; None: there is none
    route: str = "writer"
    grace: float = 60.0  # seconds; longer than both releases deliver side by side

    def environment(self, rig: Rig, *names: str) -> dict[str, str]:
        """Return the environment of its processes, which know listeners of these names, too."""
        known = [{"name": each} for each in ("", "ledger", *names)]
        own = {**rig.outbox, "ROUTE": self.route, "UNROUTABLE_GRACE": self.grace}
        return {
            "FAULTS_LISTENERS": json.dumps([*known, *filter(None, [self.changing])]),
            "FAULTS_OUTBOX": json.dumps(own),
        }


MOVED = {"name": "mail", "queue": "mails"}
RENAMED = {**MOVED, "name": "letters", "formerly": [MAIL]}
RELEASES = (
    Release(change="none", changing=None),
    Release(change="added", changing={"name": "mail"}),
    Release(change="moved", changing=MOVED),
    Release(change="renamed", changing=RENAMED),
    Release(change="unrouted", changing=RENAMED, route="worker"),
    Release(change="routed", changing=RENAMED),
    Release(change="removed", changing=None, grace=2.0),
)


@scenario(*ALL)
def rolling(rig: Rig) -> None:
    """Deploys change listeners, and who routes, while two releases run; workers are killed."""
    rig.backlog = True
    rig.outbox["QUEUES"] = {"mails": {"WORKERS": 2}}
    rig.formerly = {MAIL: LETTERS}
    lasts = rig.pick(ci=1.0, full=10.0)
    for _ in range(2):
        rig.start_workers(1, **RELEASES[0].environment(rig, "audit"))
    rig.wait_until_they_run()
    for old, new in pairwise(RELEASES * rig.pick(ci=1, full=5)):
        deploy(rig, old, new, lasts)
    rig.nothing_disturbed()


def deploy(rig: Rig, old: Release, new: Release, lasts: float) -> None:
    """Replace one release by another, the writers or the workers first."""
    expect(rig, old, new)
    writers_first = rig.luck.random() < 0.5
    write(rig, old, f"rolled.{new.change}.old", 3 * lasts)
    if writers_first:
        write(rig, new, f"rolled.{new.change}.new", 3 * lasts)
    time.sleep(lasts)  # a steady load
    rig.roll(0, **new.environment(rig, "audit"))
    if not writers_first:
        write(rig, new, f"rolled.{new.change}.new", 2 * lasts)
    time.sleep(lasts)  # both releases write and deliver
    rig.wait_until_they_run()
    rig.kill(rig.luck.randrange(2))
    rig.wait_until_they_run()
    rig.roll(1, **new.environment(rig, "audit"))
    rig.wait_for_writers()
    rig.settle_down()


def expect(rig: Rig, old: Release, new: Release) -> None:
    """Note which listeners have to get what either release writes, and which not in order.

    One that is added or removed may get what the release without it writes, too. What a worker
    adds to an event that others wrote may come after later events; so may what waits for a former
    title.
    """
    for release, name in ((old, "old"), (new, "new")):
        kind = f"rolled.{new.change}.{name}"
        known = (*ALWAYS, LETTERS) if release.changing and new.changing else ALWAYS
        rig.listeners[kind] = known
        rig.unordered[kind] = (AUDIT, LETTERS) if new.change == "renamed" else (AUDIT,)


def write(rig: Rig, release: Release, kind: str, seconds: float) -> None:
    rate = rig.pick(ci=25, full=40, sqlite=15)
    rig.start_writers(
        1,
        events=int(rate * seconds),
        rate=rate,
        kinds=(kind,),
        keys=6,
        keyed=0.6,
        fail=0.03,
        slow=0.05,
        environment=release.environment(rig),
    )
