"""A consumer of a broker that repeats whatever was not acknowledged, which tests let die.

``python -m tests.consumer SPOOL ACKNOWLEDGED [POINT NTH]`` receives each line of SPOOL that is not
in ACKNOWLEDGED yet. POINT names where it kills itself at the NTH message.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

POINTS = ("before_commit", "before_acknowledging")


def main(spool: Path, acknowledged: Path, point: str, nth: int) -> None:
    import django

    django.setup()
    from django.db import transaction

    import django_outbox as outbox

    def die_at(here: str, number: int) -> None:
        if (here, number) == (point, nth):
            os.kill(os.getpid(), signal.SIGKILL)

    known = {*acknowledged.read_text().split()}
    messages = [each for each in spool.read_text().split() if each not in known]
    for number, message in enumerate(messages, 1):
        with transaction.atomic(), outbox.inbox.once("bank", message) as first:
            if first:
                outbox.write("order.booked", {"message": message})
            die_at("before_commit", number)
        die_at("before_acknowledging", number)
        with acknowledged.open("a") as file:
            file.write(f"{message}\n")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        *(sys.argv[3:4] or [""]),
        int((sys.argv[4:] or [0])[0]),
    )
