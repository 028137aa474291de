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
                "worker/claims.py",
                "row_run(row, deadline=deadline, me",
                "row_run(row, deadline=self._held.deadline(now), me",
            )
        ],
    ),
    Broken(
        name="a lease that is not looked at before an event that was taken with another",
        kind="several at once",
        edits=[
            (
                "worker/executor.py",
                "return lease in lease.run.out and monotonic() < lease.run.deadline",
                "return True",
            )
        ],
    ),
    Broken(
        name="a stream's deadline from the end of its claim",
        edits=[
            (
                "worker/claims.py",
                "stream_run(row, deadline=deadline, me",
                "stream_run(row, deadline=self._held.deadline(monotonic()), me",
            )
        ],
    ),
    Broken(
        name="a renewal's deadline from the end of its statement",
        kind="slow heartbeat",
        edits=[
            (
                "worker/leases.py",
                "if each.id in renewed], deadline)",
                "if each.id in renewed], self._held.deadline(monotonic()))",
            )
        ],
    ),
    Broken(
        name="starts whatever the deadline",
        edits=[("worker/held.py", "not in run.out or now >= run.deadline:", "not in run.out:")],
    ),
    Broken(
        name="a release whatever the version of its stream",
        edits=[
            ("worker/runs.py", "release(run.seq, None)", "release(None, None)"),
            ("worker/runs.py", "release(run.seq if delay or waits else None,", "release(None,"),
        ],
    ),
    Broken(
        name="a write that does not wake its stream",
        edits=[("sql/insert.py", '"COALESCE({row}due_at, {now})"', '"{row}due_at"')],
    ),
    Broken(
        name="a replay that does not wake its stream",
        kind="replays",
        edits=[("models/replay.py", ".wake_streams([stream for _, stream in batch])", "")],
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
        edits=[("worker/claimer.py", "or len(self._held)):", "or False):")],
    ),
    Broken(
        name="a lost probe that is a success",
        kind="breakers",
        edits=[("worker/pauses.py", "        if decision is LOST:\n            return\n", "")],
    ),
    Broken(
        name="a probe that closes whatever comes of it",
        kind="breakers",
        edits=[("worker/pauses.py", "        if succeeded:\n", "        if True:\n")],
    ),
    Broken(
        name="a resume that moves nothing",
        kind="pauses",
        edits=[
            ("models/pause_queryset.py", "if dialect.keep_pauses([pause]):", "if dialect.clock():")
        ],
    ),
    Broken(
        name="rows parked for a pause that is over",
        kind="resumes",
        edits=[
            (
                "sql/streams.py",
                "there = self.keep_pauses({*rows.values()})",
                "there = {*rows.values()}",
            )
        ],
    ),
    Broken(
        name="streams parked for a pause that is over",
        kind="resumes",
        edits=[("sql/streams.py", "pauses - self.keep_pauses(pauses)", "pauses - pauses")],
    ),
    Broken(
        name="an interrupted resume whose rest stays parked",
        kind="resumes",
        edits=[
            ("worker/housekeeper.py", "more = (yield partial(_bring_home, pause)) or more", "pass")
        ],
    ),
    Broken(
        name="later events of a key first",
        edits=[("sql/sqlite.py", "ORDER BY seq LIMIT %s", "ORDER BY seq DESC LIMIT %s")],
    ),
    Broken(
        name="a stream that goes on after a failure",
        edits=[
            (
                "worker/runs.py",
                "if decision.status is Status.NEW or settings.STOP_ON_FIRST_FAILURE:",
                "if False:",
            )
        ],
    ),
    Broken(
        name="what runs ahead of any decision",
        edits=[
            (
                "worker/runs.py",
                "if decision is not DONE or not lease.run.waiting:",
                "if not lease.run.waiting:",
            )
        ],
    ),
    Broken(
        name="a stream forgotten when its release fails",
        kind="lost answers",
        edits=[("worker/runs.py", "+= [each for each in ended if held.put_back(each)]", "+= []")],
    ),
    Broken(
        name="a settle that leaves since when a row was leased",
        edits=[
            (
                "sql/settle.py",
                "available_at = NULL, locked_by = NULL, locked_at = NULL",
                "available_at = NULL, locked_by = NULL",
            )
        ],
    ),
    Broken(
        name="a stream whose refused release is forgotten",
        edits=[("worker/runs.py", "elif held.put_back(run):", "else:")],
    ),
    Broken(
        name="a claim that takes what is held as new",
        kind="long calls",
        edits=[("worker/held.py", "if not is_new(known, run):", "if run.table is not EVENTS:")],
    ),
    Broken(
        name="a stream that is claimed anew while it is held",
        edits=[
            (
                "worker/held.py",
                "if not is_new(known, run):",
                "if run.table is EVENTS and not is_new(known, run):",
            )
        ],
    ),
    Broken(
        name="outdated streams in claims",
        edits=[
            (
                "worker/runs.py",
                "return [*self._left_to_others, *outdated]",
                "return [*self._left_to_others]",
            )
        ],
    ),
    Broken(
        name="streams that are not renewed",
        kind="long calls",
        edits=[
            (
                "worker/leases.py",
                "for table in (EVENTS, STREAMS):\n            if not (mine",
                "for table in (EVENTS,):\n            if not (mine",
            )
        ],
    ),
    Broken(
        name="streams kept after their leases were lost",
        edits=[
            (
                "worker/held.py",
                "for each in runs if self._of(each.table).get(each.id) is each]",
                "for each in runs if False]",
            )
        ],
    ),
    Broken(
        name="a later event of a batch started before an earlier one",
        edits=[
            (
                "worker/held.py",
                "if lease.stream not in held_up and self._start(lease, now):",
                "if self._start(lease, now):",
            )
        ],
    ),
    Broken(
        name="a suspect tried by a process that has just begun",
        kind="poison",
        edits=[("worker/claimer.py", "self._settled() > 0 or now > self._proven_at", "True")],
    ),
    Broken(
        name="a failed hot claim that asks for no poll",
        kind="lost answers",
        edits=[
            ("worker/claimer.py", "self._wakeup.want_poll()  # the offers", "pass  # the offers")
        ],
    ),
    Broken(
        name="unstarted events that a stop keeps",
        kind="deploys",
        edits=[
            (
                "worker/heartbeat.py",
                "self._releases.give_back(self._held.of(EVENTS))",
                "self._releases.give_back([])",
            )
        ],
    ),
    Broken(
        name="a claimer that does not wait",
        edits=[("worker/threads.py", "if pause > 0:", "if pause > 60:")],
    ),
    Broken(
        name="a slot whose newest ends with the others",
        kind="slots",
        edits=[("worker/intake.py", "if each in mine), len(ids))", "if False), -1)")],
    ),
    Broken(
        name="a claim that brings back what was done meanwhile",
        kind="slots",
        edits=[("worker/held.py", "if self._ended and run", "if False and run")],
    ),
    Broken(
        name="a replay that is counted after its commit",
        kind="replays",
        edits=[
            (
                "models/replay.py",
                "    count += act.counted(changed, using=a",
                "count += act.counted(changed, using=a",
            )
        ],
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
