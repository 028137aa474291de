"""``python -m tests.faults.mutants``: break the engine on purpose; the harness has to notice.

Each mutant is the engine without one of its safeguards, applied to a copy of the repository; the
scenario that it names must then fail. One that is not caught ends the program with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
COPIED = ("django_outbox", "tests")
SEEDS = (1, 2, 3, 4, 5)  # tried in turn until one shows it: some faults are a matter of luck
PATIENCE = 20.0  # seconds until a delivery that does not come counts as stuck


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change to the package, for a copy of it."""

    name: str
    edits: Sequence[tuple[str, str, str]]  # file of the package, what stands there, what instead


@dataclass(frozen=True, kw_only=True)
class Mutant(Patch):
    without: str  # what keeps us from it
    database: str
    scenario: str


MUTANTS = (
    Mutant(
        name="no fence",
        without="a settle changes only rows that the worker still holds",
        database="postgres",
        scenario="pause",
        edits=[
            ("sql/statements.py", '"{0}.locked_by = %s", list', "\"%s <> ''\", list"),
            (
                "sql/statements.py",
                'f"{mine} AND {{0}}.locked_at {leased_at[0]}"',
                'f"{mine} AND (1 = 1 OR {{0}}.locked_at {leased_at[0]})"',
            ),
        ],
    ),
    Mutant(
        name="order by the time of creation",
        without="the order of a key is the number that its stream gave",
        database="postgres",
        scenario="ordered",
        edits=[
            (
                "sql/postgresql.py",
                "AND status IN {statuses}{due} ORDER BY e.seq LIMIT %s",
                "AND status IN {statuses}{due} ORDER BY e.occurred_at LIMIT %s",
            ),
            ("sql/postgresql.py", "ORDER BY s.stream, e.seq", "ORDER BY s.stream, e.occurred_at"),
        ],
    ),
    Mutant(  # a fair one: what failed, was deferred or held by a lost worker is found as before
        name="polling by a cursor",
        without="a claim asks what is due, never what is newer than the last",
        database="postgres",
        scenario="calm",
        edits=[
            (
                "sql/postgresql.py",
                """\
        wanted, params = self._wanted(claim)
""",
                """\
        wanted, params = self._wanted(claim)
        wanted += " AND (id > %s OR attempts > 0 OR locked_by IS NOT NULL"
        wanted += " OR available_at <> first_due_at)"
        params = [*params, getattr(type(self), "seen", "")]
""",
            ),
            (
                "sql/postgresql.py",
                """\
        rows.sort(key=lambda row: (row[-3], row[0]))
""",
                """\
        rows.sort(key=lambda row: (row[-3], row[0]))
        type(self).seen = max([getattr(type(self), "seen", ""), *[row[0] for row in rows]])
""",
            ),
        ],
    ),
    Mutant(
        name="an unclaimed hot path",
        without="what a process delivers of its own writes, it has leased like any other",
        database="postgres",
        scenario="rollback",
        edits=[
            (
                "sql/postgresql.py",
                "[claim.me, claim.me, claim.lease]",
                "[claim.me, claim.me, claim.lease if claim.ids is None else -1.0]",
            )
        ],
    ),
    Mutant(
        name="leases by the application's clock",
        without="the database's clock alone says what is due",
        database="postgres",
        scenario="skew",
        edits=[
            (
                "sql/postgresql.py",
                """\
    now = "statement_timestamp()"
    now_plus = "statement_timestamp() + %s * interval '1 second'"
""",
                """\
    @property
    def now(self):
        import time
        return f"to_timestamp({time.time()})"

    @property
    def now_plus(self):
        return self.now + " + %s * interval '1 second'"

""",
            )
        ],
    ),
    Mutant(
        name="no version of a stream at its release",
        without="a stream is given back only if nothing was written since it was read",
        database="postgres",
        scenario="ordered",
        edits=[("sql/streams.py", "e.seq = COALESCE(NULLIF(v.seq, -1), e.seq)", "1 = 1")],
    ),
    Mutant(
        name="claims at REPEATABLE READ",
        without="a claim is one statement after another, each at READ COMMITTED",
        database="mariadb",
        scenario="calm",
        edits=[
            (
                "sql/mysql.py",
                '"isolation_level": "read committed"}',
                '"isolation_level": "repeatable read"}',
            ),
            (
                "sql/claim.py",
                """\
        seen, cut = self._select_due(claim)
        rows = self._lease(claim, seen)
""",
                """\
        self.connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
        try:
            seen, cut = self._select_due(claim, skip_locked=True)
            rows = self._lease(claim, seen)
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise
        finally:
            self.connection.set_autocommit(True)
""",
            ),
        ],
    ),
    Mutant(
        name="no count of rescues",
        without="an event that takes its workers along is given up",
        database="postgres",
        scenario="poison",
        edits=[("sql/claim.py", "rescues = e.rescues + CASE", "rescues = e.rescues + 0 * CASE")],
    ),
    Mutant(
        name="no heartbeat",
        without="a lease is renewed for as long as its process lives",
        database="postgres",
        scenario="slow",
        edits=[
            (
                "worker/heartbeat.py",
                "    runs = held.to_renew(started)\n",
                "    runs = held.to_renew(-999.0)\n",
            )
        ],
    ),
    Mutant(
        name="a stop that hands nothing back",
        without="what still runs at the end of a stop is handed back",
        database="postgres",
        scenario="deploys",
        edits=[("worker/heartbeat.py", "        while wanted > 0:\n", "        while False:\n")],
    ),
    Mutant(
        name="a hand-back that counts as a rescue",
        without="an orderly stop is not a crash",
        database="postgres",
        scenario="deploys",
        edits=[
            (
                "sql/claim.py",
                'f"{due[0]}locked_by = NULL, locked_at = {leased_at}"',
                'f"{due[0]}locked_by = NULL, locked_at = {leased_at}, rescues = rescues + 1"',
            )
        ],
    ),
    Mutant(
        name="a process that goes on after it handed events back",
        without="to hand back what still runs is the last thing that a process does",
        database="postgres",
        scenario="deploys",
        edits=[
            (
                "process/main.py",
                "    wait(ends, timeout=HAND_BACK_DELAY / 2)\n",
                (
                    "    wait(ends, timeout=HAND_BACK_DELAY / 2)\n"
                    "    time.sleep(2 * HAND_BACK_DELAY)\n"
                ),
            )
        ],
    ),
    Mutant(
        name="a written-off thread whose result is used",
        without="what a thread says after its call was written off is ignored",
        database="postgres",
        scenario="hung",
        edits=[
            (
                "worker/executor.py",
                "            self._cleanup.close_half_made()\n            self._cleanup.after(",
                """\
            assert self.call is not None
            self.delivery.decided = [(self.call.leases[0], DONE)]
            self._deliveries.pass_on(self.delivery)
            self._cleanup.after(""",
            )
        ],
    ),
    Mutant(
        name="an atomic listener that commits though it was written off",
        without="an atomic listener commits only what it read, and only in time",
        database="postgres",
        scenario="hung",
        edits=[
            (
                "delivery/call.py",
                "        if not self.has_returned:\n",
                "        if not self.has_returned and not self.listener.atomic:\n",
            ),
            (
                "delivery/call.py",
                "        except _Rollback:\n            self.committed = None\n",
                """\
        except _Rollback:
            self.committed = None
            if not self.has_returned:
                raise CallAbandoned
""",
            ),
            (
                "delivery/call.py",
                """\
            return NotBegun()
        return answer
""",
                """\
            return NotBegun()
        if not self.has_returned:
            raise CallAbandoned  # but it has committed
        return answer
""",
            ),
        ],
    ),
    Mutant(
        name="two attempts for one timeout",
        without="a call that is written off counts as one attempt",
        database="postgres",
        scenario="hung",
        edits=[
            (
                "delivery/delivery.py",
                "        self._leases = []\n",
                """\
        self._leases = []
        self.decided = [(one, replace(each, spent=each.spent + 1)) for one, each in self.decided]
""",
            )
        ],
    ),
    Mutant(
        name="a suspect for which all others wait",
        without="claims rest for a suspect for some seconds only",
        database="postgres",
        scenario="suspect",
        edits=[
            ("worker/claimer.py", "self._max_wait = min(lease, MAX_WAIT)", "self._max_wait = 1e9")
        ],
    ),
    Mutant(
        name="claims of all that fits",
        without="a worker leases what it will start soon",
        database="postgres",
        scenario="join",
        edits=[
            (
                "worker/gate.py",
                "return min(max(MIN_PER_THREAD * self.settings.WORKERS, batches), self._max_size)",
                "return self._max_size",
            )
        ],
    ),
    Mutant(
        name="a clock that stands still in a suspended machine",
        without="the age of a lease counts the time for which the machine was suspended",
        database="postgres",
        scenario="suspended",
        edits=[("clocks.py", 'if hasattr(time, "CLOCK_BOOTTIME")', "if False")],
    ),
    Mutant(
        name="a release that leaves a stream in its queue",
        without="a released stream waits in the queue of its first event",
        database="postgres",
        scenario="queues",
        edits=[
            ("sql/streams.py", "queue = COALESCE(NULLIF(v.queue, ''), e.queue)", "queue = e.queue")
        ],
    ),
    Mutant(
        name="events of unknown queues that no worker adopts",
        without="what waits in a queue that is not configured is moved to default",
        database="postgres",
        scenario="queues",
        edits=[
            ("worker/housekeeper.py", "if monotonic() < self._search_at:", "if self._search_at:")
        ],
    ),
    Mutant(
        name="a breaker that is open for its own process only",
        without="no worker claims from a queue whose breaker is open",
        database="postgres",
        scenario="breaker",
        edits=[
            ("sql/values.py", 'CLOSING_KINDS = ("queue", "breaker")', 'CLOSING_KINDS = ("queue",)')
        ],
    ),
    Mutant(
        name="a breaker that never opens",
        without="after failures in a row nothing more is called",
        database="postgres",
        scenario="breaker",
        edits=[
            (
                "worker/pauses.py",
                "if len(failures) >= settings.failures:",
                "if len(failures) > 1e9:",
            )
        ],
    ),
    Mutant(
        name="listeners of different names that wait for each other",
        without="the listeners of a name have a lane of their own",
        database="postgres",
        scenario="siblings",
        edits=[
            (
                "listeners/registry.py",
                "    return name if is_usual else",
                '    return "" if is_usual else',
            )
        ],
    ),
    Mutant(
        name="events that are not completed at their claim",
        without="listeners that the writer did not know are given an event at its claim",
        database="postgres",
        scenario="rolling",
        edits=[
            (
                "worker/intake.py",
                '    return not missing_of(aggregate_type, event_type, routes or "")\n',
                "    return True\n",
            )
        ],
    ),
    Mutant(
        name="receipts that workers of before a rename do not know",
        without="a receipt has the former titles of a listener, too",
        database="postgres",
        scenario="rolling",
        edits=[
            (
                "listeners/queues.py",
                'return "/".join((self.digest, *self.former))',
                "return self.digest",
            )
        ],
    ),
    Mutant(
        name="a cancel of what a worker has leased",
        without="what a worker has leased is not cancelled",
        database="postgres",
        scenario="reminders",
        edits=[("models/replay.py", "alone(pending.filter(locked_by=None)", "alone(pending")],
    ),
    Mutant(
        name="a cancel in a stream that a worker has leased",
        without="nothing is cancelled in a stream that a worker has leased",
        database="mariadb",
        scenario="reminders",
        edits=[("models/replay.py", "change(in_free_streams(batch))", "change(batch)")],
    ),
    Mutant(
        name="a slot that ends what is older than another worker's row",
        without="only a row that is started after a commit replaces what was committed",
        database="postgres",
        scenario="reminders",
        edits=[
            ("sql/settle.py", "AND ({FREE} OR locked_by = %s) ", "AND (TRUE OR id = %s) "),
            (
                "worker/intake.py",
                "[row_id for row_id, is_leased in each if not is_leased or row_id in slots[slot]]",
                "[row_id for row_id, _ in each]",
            ),
            (
                "worker/intake.py",
                "next((place for place, each in enumerate(ids) if each in mine), len(ids))",
                "0",
            ),
        ],
    ),
    Mutant(
        name="a slot that runs its oldest row",
        without="of a slot, the newest row runs",
        database="mariadb",
        scenario="reminders",
        edits=[("sql/settle.py", "sorted(some, reverse=True)", "sorted(some)")],
    ),
    Mutant(
        name="an atomic batch that commits what it has lost",
        without="an atomic batch commits only if all of its events are still leased by its worker",
        database="postgres",
        scenario="batches",
        edits=[
            (
                "delivery/delivery.py",
                "            == settle_within(\n",
                "            >= settle_within(\n",
            )
        ],
    ),
    Mutant(
        name="a failed batch that goes on without its lease",
        without="the halves of a failed batch are called only while its worker has the lease",
        database="postgres",
        scenario="batches",
        edits=[
            (
                "delivery/delivery.py",
                "            if not tidied.goes_on:\n",
                "            if tidied.goes_on is None:\n",
            )
        ],
    ),
    Mutant(
        name="a batch that is settled twice",
        without="what was decided before a batch was cut off is not decided once more",
        database="postgres",
        scenario="poisoned_batches",
        edits=[
            (
                "delivery/delivery.py",
                "        del self.left[lease.id]\n        if self._halving",
                "        if self._halving",
            )
        ],
    ),
    Mutant(
        name="a half that overtakes an event of its key",
        without="after a failed call, an event waits for those of its key in the other half",
        database="postgres",
        scenario="batches",
        edits=[
            (
                "delivery/delivery.py",
                "            elif each.stream in held_up:\n",
                "            elif False:\n",
            )
        ],
    ),
    Mutant(
        name="a failure that counts for a whole key",
        without="a failed call counts an attempt for the first event of each key only",
        database="postgres",
        scenario="batches",
        edits=[
            (
                "delivery/delivery.py",
                "            if each.stream in failed:\n",
                "            if False:\n",
            )
        ],
    ),
    Mutant(
        name="a failed batch that is not split",
        without="good events do not fail with a bad one: the batch is halved",
        database="postgres",
        scenario="poisoned_batches",
        edits=[
            (
                "delivery/delivery.py",
                "split = part[:1] if isinstance(answer, FOR_ALL) else part",
                "split = part[:1]",
            ),
            (
                "delivery/delivery.py",
                "            if isinstance(answer, FOR_ALL):\n",
                "            if True:\n",
            ),
        ],
    ),
    Mutant(
        name="a message that counts as sent before its confirmation",
        without="what a broker did not confirm is sent again",
        database="postgres",
        scenario="relays_redis",
        edits=[
            (
                "relays/redis.py",
                """\
        try:
            return [*commands.execute(raise_on_error=False)]
        except (exceptions.RedisError, OSError) as error:
            raise BrokerUnavailable(f"{self._name} is not available: {error}") from None
""",
                """\
        count = len(commands)
        try:
            return [*commands.execute(raise_on_error=False)]
        except (exceptions.RedisError, OSError):
            return [None] * count
""",
            )
        ],
    ),
    Mutant(
        name="an outage that costs attempts",
        without="a broker that is away costs no event an attempt",
        database="postgres",
        scenario="relays_redis",
        edits=[
            (
                "delivery/decide.py",
                "    if isinstance(error, BrokerUnavailable):\n",
                "    if False:\n",
            )
        ],
    ),
    Mutant(
        name="a silence in mid batch that costs attempts",
        without="a broker that falls silent in mid batch is away",
        database="postgres",
        scenario="relays_nats",
        edits=[
            (
                "relays/session.py",
                "outcomes = heard([next(answers) if each is None else each for each in outcomes])",
                "outcomes = [next(answers) if each is None else each for each in outcomes]",
            )
        ],
    ),
    Mutant(
        name="a breaker that does not open for a broker",
        without="while a broker is away, its connection is checked and no event is tried",
        database="postgres",
        scenario="relays_redis",
        edits=[
            (
                "worker/pauses.py",
                "            elif decision.unavailable:\n",
                "            elif False:\n",
            )
        ],
    ),
    Mutant(
        name="a breaker that does not close for a broker",
        without="events flow again soon after the broker's return",
        database="postgres",
        scenario="relays_redis",
        edits=[("worker/pauses.py", "trial.succeeded = True", "trial.succeeded = False")],
    ),
    Mutant(
        name="claims that do not wait for other nodes",
        without="a worker sees what other nodes of a cluster have committed",
        database="galera",
        scenario="galera",
        edits=[("sql/mysql.py", "wsrep_sync_wait = 7", "wsrep_sync_wait = 0")],
    ),
    Mutant(
        name="listeners that do not wait for other nodes",
        without="an atomic listener finds its own lease, whichever node it is connected to",
        database="galera",
        scenario="galera",
        edits=[("worker/connection_cleanup.py", "        begin_session(connection)\n", "")],
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants", description=__doc__)
    parser.add_argument("--only", action="append", help="a part of a mutant's name")
    parser.add_argument("--keep", type=Path, help="a directory for logs and witnesses")
    parser.add_argument("--out", type=Path, help="a file that a line for each is added to")
    options = parser.parse_args()
    missed = 0
    for mutant in MUTANTS:
        if options.only and not any(part in mutant.name for part in options.only):
            continue
        found = tried(mutant, options.keep)
        missed += not found["caught"]
        print(
            f"{'caught' if found['caught'] else 'MISSED':<8} {mutant.name:<40} "
            f"{mutant.database} {mutant.scenario}, seed {found['seed']}: {found['by']}",
            flush=True,
        )
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return 1 if missed else 0


def tried(mutant: Mutant, keep: Path | None) -> dict[str, Any]:
    """Let the harness run on the mutant, with one seed after the other until it fails."""
    with patched_copy(mutant) as copy:
        by: dict[str, Any] = {}
        for seed in SEEDS:
            if by := symptoms(mutant, copy, seed, keep):
                break
    return {
        "mutant": mutant.name,
        "without": mutant.without,
        "db": mutant.database,
        "scenario": mutant.scenario,
        "seed": seed,
        "caught": bool(by),
        "by": by,
    }


@contextmanager
def patched_copy(patch: Patch) -> Iterator[Path]:
    """Copy the repository, without what no run needs, and edit the copy's package."""
    with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as place:
        copy = Path(place) / "repository"
        for each in COPIED:
            shutil.copytree(REPOSITORY / each, copy / each)
        for name, text in edited(patch, copy / "django_outbox").items():
            (copy / "django_outbox" / name).write_text(text)
        shutil.copy(REPOSITORY / "pyproject.toml", copy)  # it configures pytest
        yield copy


def edited(patch: Patch, package: Path) -> dict[str, str]:
    """Return the files that a patch changes; what it replaces must be there exactly once."""
    found: dict[str, str] = {}
    for name, old, new in patch.edits:
        text = found.get(name) or (package / name).read_text()
        if (count := text.count(old)) != 1:
            raise LookupError(
                f"The patch {patch.name!r} finds {old!r} {count} times in {name}; expected once. "
                "The engine has changed: mend the patch."
            )
        found[name] = text.replace(old, new)
    return found


def symptoms(mutant: Mutant, copy: Path, seed: int, keep: Path | None) -> dict[str, Any]:
    """Return what the harness found wrong; empty if nothing."""
    kept = ["--keep", str(keep / mutant.name.replace(" ", "-"))] if keep else []
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.faults",
            *kept,
            "--db",
            mutant.database,
            "--scenario",
            mutant.scenario,
            "--seed",
            str(seed),
            "--patience",
            str(PATIENCE),
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"the harness itself failed on {mutant.name!r}:\n{done.stderr[-2000:]}")
    line = json.loads(done.stdout)
    return {} if line["holds"] else wrong(line)


def wrong(line: dict[str, Any]) -> dict[str, Any]:
    """Return the violations and the broken bars of a run."""
    found = {name: line[name] for name in line["violations"]}
    return found | {each["name"]: each["value"] for each in line["figures"] if not each["holds"]}


if __name__ == "__main__":
    sys.exit(main())
