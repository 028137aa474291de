"""The safeguards of the engine that a history can miss: how to take each of them away."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.mutants import Patch


@dataclass(frozen=True, kw_only=True)
class Broken(Patch):
    """A safeguard that is taken away, for the simulation alone."""

    kind: str | None = None  # of the histories that may show it; None: all


OWN = (
    Broken(
        name="a release that ends any lease of its worker",
        kind="stalled releases",
        edits=[("sql/streams.py", "AND e.locked_at = v.locked_at", "")],
    ),
    Broken(
        name="a settle that ends any lease of its worker",
        edits=[("sql/settle.py", '("= v.locked_at", [])', '("IS NOT NULL", [])')],
    ),
    Broken(
        name="a DONE, a release or a renewal of any lease of its worker",
        edits=[
            (
                "sql/statements.py",
                'f"IN ({marks(instants)})"',
                "f\"<> '' OR '' IN ({marks(instants)})\"",
            )
        ],
    ),
    Broken(
        name="a repeated settle that counts twice",
        kind="lost answers",
        edits=[("sql/settle.py", "e.attempts = v.attempts AND {", "{")],
    ),
    Broken(
        name="a claim's deadline from the end of its statement",
        edits=[
            (
                "worker/event_claims.py",
                "by_id, now = hot or {}, monotonic()",
                "by_id, now = hot or {}, monotonic()\n        deadline = self._held.deadline(now)",
            )
        ],
    ),
    Broken(
        name="a stream's deadline from the end of its claim",
        edits=[
            (
                "worker/stream_claims.py",
                "Stream(name, deadline, locked_at, rescues, lost,",
                "Stream(name, self._held.deadline(monotonic()), locked_at, rescues, lost,",
            )
        ],
    ),
    Broken(
        name="a renewal's deadline from the end of its statement",
        kind="slow heartbeat",
        edits=[
            (
                "worker/leases.py",
                "        self._held.renewed([",
                "        deadline = self._held.deadline(monotonic())\n        self._held.renewed([",
            )
        ],
    ),
    Broken(
        name="a stream's deadline from the end of its renewal",
        kind="slow heartbeat",
        edits=[
            (
                "worker/streams.py",
                "self._set_deadline(some[key], deadline)",
                "self._set_deadline(some[key], self._held.deadline(monotonic()))",
            )
        ],
    ),
    Broken(
        name="starts whatever the deadline",
        edits=[("worker/queues.py", "is not lease or now >= lease.deadline:", "is not lease:")],
    ),
    Broken(
        name="a release whatever the version of its stream",
        edits=[
            ("worker/stream.py", "    seq = stream.seq if delay else None\n", "    seq = None\n"),
            (
                "worker/stream.py",
                "Release(name, locked_at, stream.seq, None,",
                "Release(name, locked_at, None, None,",
            ),
        ],
    ),
    Broken(
        name="a write that does not wake its stream",
        edits=[("sql/sequence_numbers.py", '"COALESCE({row}due_at, {now})"', '"{row}due_at"')],
    ),
    Broken(
        name="a replay that does not wake its stream",
        kind="replays",
        edits=[
            (
                "models/replay.py",
                "dialect_of(connection).wake_streams([stream for _, stream in batch])",
                "pass",
            )
        ],
    ),
    Broken(
        name="a claim that ignores the due time",
        edits=[
            (
                "sql/claim.py",
                "AND {self.unindexed}{table.due} <= %s",
                "AND {self.unindexed}{table.due} <= {'' if table is STREAMS else '9||'}%s",
            )
        ],
    ),
    Broken(
        name="a claim of streams that ignores the due time",
        edits=[
            (
                "sql/claim.py",
                "AND {self.unindexed}{table.due} <= %s",
                "AND {self.unindexed}{table.due} <= {'' if table is EVENTS else '9||'}%s",
            )
        ],
    ),
    Broken(
        name="suspects in ordinary claims",
        kind="poison",
        edits=[
            (
                "sql/values.py",
                '"(rescues = 0 OR (rescues = 1 AND (locked_by IS NULL OR locked_by = %s)))"',
                '"(rescues < 99 OR locked_by = %s)"',
            )
        ],
    ),
    Broken(
        name="no count of rescues",
        kind="poison",
        edits=[("sql/claim.py", "rescues = e.rescues + CASE", "rescues = e.rescues + 0 * CASE")],
    ),
    Broken(
        name="a stream's count that is kept when its suspect has been tried",
        kind="poison",
        edits=[("worker/settler.py", "    if suspected:\n", "    if False:\n")],
    ),
    Broken(
        name="a stream's count that any release clears",
        kind="poison",
        edits=[("sql/streams.py", "rescues = e.rescues * v.kept", "rescues = 0 * v.kept")],
    ),
    Broken(
        name="a stream's count that nothing clears",
        kind="poison",
        edits=[("sql/streams.py", "rescues = e.rescues * v.kept", "rescues = e.rescues")],
    ),
    Broken(
        name="a suspect beside other events",
        kind="poison",
        edits=[("worker/claimer.py", "or not self.held.wait_empty(0.05):", "or False:")],
    ),
    Broken(
        name="a lost probe that is a success",
        kind="breakers",
        edits=[("worker/breaker.py", "        if decision is LOST:\n            return\n", "")],
    ),
    Broken(
        name="a probe that closes whatever comes of it",
        kind="breakers",
        edits=[("worker/breaker.py", "        if succeeded:\n", "        if True:\n")],
    ),
    Broken(
        name="a resume that wakes nothing",
        kind="pauses",
        edits=[("models/pause_queryset.py", "    if kind in CLOSING_KINDS:\n", "    if True:\n")],
    ),
    Broken(
        name="later events of a key first",
        edits=[("sql/streams.py", "ORDER BY seq LIMIT %s", "ORDER BY seq DESC LIMIT %s")],
    ),
    Broken(
        name="a stream that goes on after a failure",
        edits=[
            (
                "worker/streams.py",
                "if decision.status is Status.NEW or settings.STOP_ON_FIRST_FAILURE:",
                "if False:",
            )
        ],
    ),
    Broken(
        name="what runs ahead of any decision",
        edits=[
            (
                "worker/streams.py",
                "if decision is not DONE or lease.stream is None:",
                "if lease.stream is None:",
            )
        ],
    ),
    Broken(
        name="a stream forgotten when its release fails",
        kind="lost answers",
        edits=[("worker/streams.py", "if self._put_back(each)]", "if False]")],
    ),
    Broken(
        name="a stream whose refused release is forgotten",
        edits=[
            (
                "worker/streams.py",
                "            self._put_back(stream)\n            return stream.read_at",
                "            return stream.read_at",
            )
        ],
    ),
    Broken(
        name="a claim that takes what is held as new",
        kind="long calls",
        edits=[
            (
                "worker/queues.py",
                "if known is None or not (lease.renewal or goes_on(known, lease)):",
                "if True:",
            )
        ],
    ),
    Broken(
        name="a stream that is claimed anew while it is held",
        edits=[
            (
                "worker/streams.py",
                "known = self._streams.setdefault(stream.name, stream)\n",
                "known = self._streams[stream.name] = stream\n",
            )
        ],
    ),
    Broken(
        name="outdated streams in claims",
        edits=[
            (
                "worker/stream.py",
                "return [*self._left_to_others, *outdated]",
                "return [*self._left_to_others]",
            )
        ],
    ),
    Broken(
        name="streams that are not renewed",
        kind="long calls",
        edits=[
            ("worker/leases.py", "        if self._streams is not None:\n", "        if False:\n")
        ],
    ),
    Broken(
        name="streams kept after their leases were lost",
        edits=[
            (
                "worker/streams.py",
                "for each in streams if self._streams.get(each.name) is each]",
                "for each in streams if False]",
            )
        ],
    ),
    Broken(
        name="a later event of a batch started before an earlier one",
        edits=[
            (
                "worker/queues.py",
                "if lease.stream in held_up or self._start(lease, now):",
                "if self._start(lease, now):",
            )
        ],
    ),
    Broken(
        name="a suspect tried by a process that has just begun",
        kind="poison",
        edits=[
            (
                "worker/quarantine.py",
                "is_proven = settled > 0 or now > self.proven_at",
                "is_proven = True",
            )
        ],
    ),
    Broken(
        name="a failed hot claim that asks for no poll",
        kind="lost answers",
        edits=[
            (
                "worker/claimer.py",
                "self._wakeup.poll_wanted = True  # the offers are gone",
                "pass  # the offers are gone",
            )
        ],
    ),
    Broken(
        name="unstarted events that a stop keeps",
        kind="deploys",
        edits=[
            (
                "worker/stopping.py",
                "            unstarted = self._held.unstarted()\n",
                "            unstarted = self._held.running()\n",
            )
        ],
    ),
    Broken(
        name="a claimer that does not wait",
        edits=[
            (
                "worker/threads.py",
                "                if pause > 0:\n",
                "                if pause > 60:\n",
            )
        ],
    ),
    Broken(
        name="a slot whose newest ends with the others",
        kind="slots",
        edits=[("worker/coalescing.py", "if each in mine), len(ids))", "if False), -1)")],
    ),
    Broken(
        name="a claim that brings back what was done meanwhile",
        kind="slots",
        edits=[("worker/queues.py", "if ended and lease", "if False and lease")],
    ),
    Broken(
        name="a log handler that ends the thread that it fails",
        kind="faulty places",
        edits=[("log.py", "logger.__class__ = type(", "_Unused = type(")],
    ),
    Broken(
        name="a thread that ends by an error that no database raises",
        kind="faulty places",
        edits=[
            (
                "worker/threads.py",
                "except Exception as error:  # noqa: BLE001 - reported, and the thread",
                "except DatabaseError as error:  # the thread",
            )
        ],
    ),
)
