"""People at work: everything that the admin and the commands can do, at random and all at once."""

from __future__ import annotations

import io
import json
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIST = "/admin/django_outbox/outboxevent/"
STREAMS = "/admin/django_outbox/outboxstream/"
PAUSES = "/admin/django_outbox/outboxpause/"


@contextmanager
def doing(diary: Path, what: str, ids: Sequence[str]) -> Iterator[None]:
    """Note what is asked of events in the block."""
    at = time.monotonic()
    yield
    line = {"what": what, "ids": [*ids], "at": at, "until": time.monotonic()}
    with diary.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(diary: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in diary.read_text().splitlines()]


class Person:
    """Somebody who may do everything, and beside them some who may not."""

    def __init__(self, diary: Path, seed: str) -> None:
        from django.contrib.auth.models import User
        from django.test import Client

        self.diary, self.luck, self.met = diary, random.Random(seed), Counter[str]()
        self.boss = Client(raise_request_exception=False)
        self.boss.force_login(User.objects.create_superuser("boss"))
        self.unknown_name, self.clerk, self.forged = (
            Client(),
            Client(),
            Client(enforce_csrf_checks=True),
        )
        self.clerk.force_login(User.objects.create_user("clerk", is_staff=True))
        self.forged.force_login(User.objects.get(username="boss"))
        self.deeds = [
            self.replay,
            self.replay_by_command,
            self.discard,
            self.run_now,
            self.skip,
            self.pause,
            self.pause_by_command,
            self.look_around,
            self.try_what_is_forbidden,
        ]

    def work(self, seconds: float) -> None:
        from django.contrib.admin.models import LogEntry
        from django.core.management import call_command

        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for deed in self.luck.sample(self.deeds, len(self.deeds)):
                deed()
                self.met[deed.__name__] += 1
        call_command("outbox_pause", end=True, all=True, stdout=io.StringIO())
        self.met["logged"] = LogEntry.objects.count()

    def replay_all(self) -> None:
        """Replay all that is dead, as the list's "all that match" does; wait for the workers."""
        from django_outbox.models import OutboxOperation

        url = f"{LIST}all/replay/?state=dead"
        self.seen(self.boss.get(url))
        self.seen(self.boss.post(url, {"rate": "", "limit": ""}))
        while OutboxOperation.objects.open().exists():
            time.sleep(0.1)

    # -- what they find --------------------------------------------------------------------------

    def dead(self, most: int = 20) -> list[str]:
        from django_outbox.models import OutboxEvent

        return [*OutboxEvent.objects.dead().values_list("event_id", flat=True)[:most]]

    def any(self, most: int = 20) -> list[str]:
        """Events in whatever state: most verbs are not meant for them."""
        from django_outbox.models import OutboxEvent

        return [*OutboxEvent.objects.order_by("-pk").values_list("pk", flat=True)[:most]]

    def post(self, url: str, verb: str, ticked: Sequence[Any], **more: Any) -> str:
        """Run an action of a list; return the page that comes of it."""
        data = {"action": verb, "_selected_action": ticked, "index": "0", "select_across": "0"}
        return self.seen(self.boss.post(url, {**data, **more}))

    def seen(self, response: Any) -> str:
        self.met["errors"] += response.status_code >= 400
        return str(response.content.decode()) if response.status_code == 200 else ""

    # -- what they do ----------------------------------------------------------------------------

    def replay(self) -> None:
        ids = [*self.dead(), *self.any(5)]
        with doing(self.diary, "replay", ids):
            self.post(LIST, "replay", ids, outbox_event=ids, outbox_confirmed="yes")

    def replay_by_command(self) -> None:
        from django.core.management import call_command

        ids = self.dead(100)
        if ids:
            with doing(self.diary, "replay", ids):
                call_command("outbox_replay", *ids, stdout=io.StringIO(), stderr=io.StringIO())

    def discard(self) -> None:
        ids = [*self.dead(3), *self.any(5)]
        with doing(self.diary, "discard", ids):
            self.post(LIST, "discard", ids, outbox_event=ids, outbox_confirmed="yes")

    def run_now(self) -> None:
        ids = self.any()
        self.post(LIST, "run_now", ids, outbox_event=ids, outbox_confirmed="yes")

    def skip(self) -> None:
        """Give up what is first in some streams, as the page that asks shows it."""
        from django_outbox.models import OutboxStream

        keys = [*OutboxStream.objects.order_by("?").values_list("pk", flat=True)[:3]]
        page = self.post(f"{STREAMS}?state=all", "skip", keys)
        heads = re.findall(r'name="outbox_event" value="([^"]+)"', page)
        if heads:
            asked = {"outbox_event": heads, "outbox_confirmed": "yes"}
            with doing(self.diary, "skip", heads):
                self.post(f"{STREAMS}?state=all", "skip", keys, **asked)

    def pause(self) -> None:
        from django_outbox.models import OutboxPause

        form = {"kind": "event_type", "name": "fault.booked", "reason": "why not", "force": "on"}
        self.seen(self.boss.post(f"{PAUSES}add/", form))
        self.met["paused"] += OutboxPause.objects.exists()
        self.look_around()
        for pause in OutboxPause.objects.all():
            self.post(PAUSES, "resume", [pause.pk])

    def pause_by_command(self) -> None:
        from django.core.management import call_command

        said = {"stdout": io.StringIO(), "stderr": io.StringIO()}
        call_command(
            "outbox_pause", "--event-type", "fault.plain", "--reason", "a look", "--force", **said
        )
        time.sleep(self.luck.uniform(0, 0.3))  # how long it is paused
        call_command("outbox_pause", "--end", "--event-type", "fault.plain", **said)

    def look_around(self) -> None:
        pages = [LIST, f"{LIST}?state=dead", f"{LIST}?q=fault", STREAMS, f"{STREAMS}?state=all"]
        pages += [f"{LIST}{each}/change/" for each in self.any(1)]
        self.seen(self.boss.get(self.luck.choice(pages), follow=True))

    def try_what_is_forbidden(self) -> None:
        """Nobody but the boss may do a thing, and the boss only with a token."""
        ids = self.any()
        for client in (self.unknown_name, self.clerk, self.forged):
            for verb in ("replay", "discard", "run_now"):
                data = {
                    "action": verb,
                    "_selected_action": ids,
                    "index": "0",
                    "outbox_event": ids,
                    "outbox_confirmed": "yes",
                }
                answer = client.post(LIST, data)
                login = answer.status_code == 302 and "/login/" in answer.headers["Location"]
                self.met["let in"] += not (login or answer.status_code == 403)


def main() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    logging.getLogger("django.request").setLevel(logging.CRITICAL)  # of what is refused
    given = json.loads(sys.argv[1])  # "seconds" of all deeds, or one replay of all that is dead
    call_command("migrate", verbosity=0)
    person = Person(Path(given["diary"]), given["seed"])
    if "seconds" in given:
        person.work(given["seconds"])
    else:
        person.replay_all()
    print(json.dumps(person.met))


if __name__ == "__main__":
    main()
