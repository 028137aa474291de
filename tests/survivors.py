"""``python -m tests.survivors``: break the package on purpose; a quick test has to notice.

The other tests pass with each of these changes. Each is made to a copy of the repository,
where the test that it names must fail, on SQLite if it names no other database. One that survives
ends the program with 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.mutants import REPOSITORY, Patch, patched_copy

ROUTES = "tests/conformance/test_routes.py::"
DEADLINES = "tests/unit/test_lease_deadlines.py::test_a_lease_counts_from_before_its_statement"
RENEWED = "tests/unit/test_lease_deadlines.py::test_what_a_claim_renews_goes_on_by_the_new_lease"


@dataclass(frozen=True, kw_only=True)
class Survivor(Patch):
    test: str  # the id of the test that fails, or of one with several parameters
    database: str = "sqlite"  # on which it fails


SURVIVORS = (
    Survivor(
        name="an event that waits for the thread that has taken it",
        edits=[
            (
                "worker/executor.py",
                "            if call is not None and 0.0 < call.started < now - SLOW_CALL:\n",
                "            if call is not None and now > call.ends_at:\n",
            )
        ],
        test="tests/test_timeouts.py::test_no_event_waits_behind_a_call_that_lasts",
    ),
    Survivor(
        name="a claim of what was due when it was read",
        edits=[
            ("sql/claim.py", "instant(max(row[-3] for row in rows), self.connection)", '"9999"')
        ],
        test="tests/conformance/test_claim_due_time.py"
        "::test_a_claim_leaves_an_event_that_is_due_later_by_now",
    ),
    Survivor(
        name="a claimed event's deadline that counts from the statement's end",
        edits=[
            (
                "worker/claims.py",
                "row_run(row, deadline=deadline, me",
                "row_run(row, deadline=self._held.deadline(now), me",
            )
        ],
        test=f"{DEADLINES}[claim_event-too late]",
    ),
    Survivor(
        name="a claimed stream's deadline that counts from the statement's end",
        edits=[
            (
                "worker/claims.py",
                "stream_run(row, deadline=deadline, me",
                "stream_run(row, deadline=self._held.deadline(monotonic()), me",
            )
        ],
        test=f"{DEADLINES}[claim_stream-too late]",
    ),
    Survivor(
        name="a renewed deadline that counts from the statement's end",
        edits=[
            (
                "worker/leases.py",
                "if each.id in renewed], deadline)",
                "if each.id in renewed], self._held.deadline(monotonic()))",
            )
        ],
        test=f"{DEADLINES}[renew_event-too late]",
    ),
    Survivor(
        name="a known deadline that counts from the claim's end",
        edits=[
            (
                "worker/held.py",
                "known.deadline, known.locked_at = run.deadline, run.locked_at",
                "known.deadline, known.locked_at = self.deadline(monotonic()), run.locked_at",
            )
        ],
        test=f"{DEADLINES}[claim_known_event-too late]",
    ),
    Survivor(
        name="a known run that goes on by its older lease",
        edits=[
            (
                "worker/held.py",
                "known.deadline, known.locked_at = run.deadline, run.locked_at",
                "known.deadline = run.deadline",
            )
        ],
        test=f"{RENEWED}[stream]",
    ),
    Survivor(
        name="a stream's count that is kept when its suspect has been tried",
        edits=[("worker/settler.py", "    if suspected:\n", "    if False:\n")],
        test="tests/test_ordered.py::test_what_is_behind_a_suspect_does_not_die_for_it",
    ),
    Survivor(
        name="a locked row that is forgotten when it is given back",
        edits=[("worker/leases.py", "        if left:\n", "        if False:\n")],
        test="tests/conformance/test_stops.py"
        "::test_a_row_that_is_locked_when_it_is_given_back_stays_held_until_it_is_free",
        database="postgres",
    ),
    Survivor(
        name="a statement by any lease of its worker",
        edits=[
            (
                "sql/statements.py",
                'f"IN ({marks(instants)})"',
                "f\"<> '' OR '' IN ({marks(instants)})\"",
            )
        ],
        test="tests/conformance/test_fences.py::test_a_row_is_changed_only_by_its_present_lease",
    ),
    Survivor(
        name="a settle that counts again when it is repeated",
        edits=[("sql/settle.py", "e.attempts = v.attempts AND {", "{")],
        test="tests/conformance/test_fences.py"
        "::test_a_failure_counts_once_though_its_stream_is_still_leased",
    ),
    Survivor(
        name="a release of streams by any lease of its worker",
        edits=[("sql/streams.py", "AND e.locked_at = v.locked_at", "")],
        test="tests/conformance/test_fences.py::test_a_stream_is_changed_only_by_its_present_lease",
    ),
    Survivor(
        name="a settle by any lease of its batch",
        edits=[("sql/settle.py", '("= v.locked_at", [])', '("IS NOT NULL", [])')],
        test="tests/conformance/test_fences.py"
        "::test_a_failure_is_settled_by_its_own_lease_and_not_by_one_of_its_batch",
    ),
    Survivor(
        name="a claim that keeps the lease that its worker had",
        edits=[
            (
                "sql/claim.py",
                "locked_by = %s, locked_at = %s, {table",
                "locked_by = %s, locked_at = COALESCE(locked_at, %s), {table",
            )
        ],
        test="tests/conformance/test_fences.py::test_each_claim_is_a_lease_of_its_own",
    ),
    Survivor(
        name="a named lease that counts from the statement's end",
        edits=[
            (
                "worker/leases.py",
                "return self._record(taken, started)",
                "return self._record(taken, monotonic())",
            )
        ],
        test=f"{DEADLINES}[take_named_lease-too late]",
    ),
    Survivor(
        name="a renewed named lease that counts from the statement's end",
        edits=[
            (
                "worker/leases.py",
                "return self._record(renewed, started)",
                "return self._record(renewed, monotonic())",
            )
        ],
        test=f"{DEADLINES}[renew_named_lease-too late]",
    ),
    Survivor(
        name="a claim on SQLite that takes a row whatever became of it since the look",
        edits=[("sql/sqlite.py", "AND attempts = %s", "AND attempts + 999 > %s")],
        test="tests/conformance/test_claim_due_time.py"
        "::test_a_claim_leaves_an_event_that_was_tried_since_and_is_due_at_once",
    ),
    Survivor(
        name="a failed claim of offers that asks for no poll",
        edits=[
            ("worker/claimer.py", "self._wakeup.want_poll()  # the offers", "pass  # the offers")
        ],
        test="tests/unit/test_hot_claims.py::test_a_poll_follows_a_claim_of_offers_that_failed",
    ),
    Survivor(
        name="a parked row that is given back where it was when it was claimed",
        edits=[
            (
                "worker/claims.py",
                "lease.locked_at, lease.due_at, lease.queue",
                "lease.locked_at, lease.due_at, lease.run.queue",
            )
        ],
        test="tests/unit/test_hot_claims.py::test_an_offer_that_is_parked_is_not_given_back_there",
    ),
    Survivor(
        name="offers without a free thread that ask for no poll",
        edits=[("worker/claimer.py", "self._wakeup.want_poll()  # perhaps", "pass  # perhaps")],
        test="tests/unit/test_hot_claims.py::test_a_poll_follows_offers_for_which_no_thread_was_free",
    ),
    Survivor(
        name="a lost call that a breaker counts as a success",
        edits=[
            (
                "worker/pauses.py",
                "        if decision is LOST:\n            return\n",
                "        if decision is LOST and self._trial:\n            return\n",
            )
        ],
        test="tests/unit/test_breaker.py"
        "::test_failures_in_a_row_trip_it_and_what_was_lost_is_neither",
    ),
    Survivor(
        name="a lost probe that closes its breaker",
        edits=[
            (
                "worker/pauses.py",
                "        if decision is LOST:\n            return\n",
                "        if decision is LOST and not self._trial:\n            return\n",
            )
        ],
        test="tests/unit/test_breaker.py::test_only_a_success_of_the_probe_closes_it",
    ),
    Survivor(
        name="a probe without compare-and-set",
        edits=[("sql/dialect.py", "AND name = %s AND until <= {self.now}", "AND name = %s")],
        test="tests/conformance/test_queue_sql.py::test_a_breaker_is_probed_when_its_pause_is_over",
    ),
    Survivor(
        name="a batch without an outcome that counts as a success",
        edits=[
            ("delivery/decide.py", "next(iter(decisions), LOST))", "next(iter(decisions), DONE))")
        ],
        test="tests/unit/test_breaker.py::test_a_batch_has_failed_if_all_that_it_called_has",
    ),
    Survivor(
        name="a relay that uses its parent's connection",
        edits=[
            (
                "relays/relay.py",
                "if session is None or not session.is_ours or session.failed:",
                "if session is None or session.failed:",
            )
        ],
        test="tests/unit/test_relay_sessions.py"
        "::test_a_forked_process_opens_a_connection_of_its_own",
    ),
    Survivor(
        name="a relay that closes its parent's connection when it opens one",
        edits=[
            (
                "relays/relay.py",
                "                if session is not None and session.is_ours:\n",
                "                if session is not None:\n",
            )
        ],
        test="tests/unit/test_relay_sessions.py::test_a_forked_process_opens_a_connection_of_its_own",
    ),
    Survivor(
        name="a relay that closes its parent's connection at its end",
        edits=[
            (
                "relays/relay.py",
                "session is not None and session.is_ours:\n            session.retire()\n",
                "session is not None:\n            session.retire()\n",
            )
        ],
        test="tests/unit/test_relay_sessions.py::test_a_forked_process_does_not_close_the_connection_of_its_parent",
    ),
    Survivor(
        name="a later event of a key that starts without an earlier one",
        edits=[
            (
                "worker/held.py",
                "if lease.stream not in held_up and self._start(lease, now):",
                "if self._start(lease, now):",
            )
        ],
        test="tests/unit/test_start_order.py"
        "::test_what_is_behind_a_lost_event_of_its_key_does_not_start",
    ),
    Survivor(
        name="a batch with an event behind one that its queue turned away",
        edits=[
            (
                "worker/held.py",
                "elif lease.stream is not None:",
                "elif lease.stream is not None and not lease.turned_away:",
            )
        ],
        test="tests/unit/test_start_order.py"
        "::test_a_batch_calls_nothing_behind_what_its_queue_turned_away",
    ),
    Survivor(
        name="a batch that takes an event behind one that is not the last",
        edits=[
            (
                "worker/runs.py",
                (
                    " or run.out[-1:] != [lease]:\n                return None\n"
                    "            follower = run.waiting[0]\n            if"
                ),
                (
                    ":\n                return None\n"
                    "            follower = run.waiting[0]\n            if"
                ),
            )
        ],
        test="tests/unit/test_start_order.py::test_a_batch_takes_them_one_behind_the_other",
    ),
    Survivor(
        name="a header that commands the broker, sent",
        edits=[
            (
                "relays/envelope.py",
                "if commands is None or not commands.fullmatch(name)",
                "if commands is None or name",
            )
        ],
        test="tests/test_relay_headers.py::test_commands_are_left_out_and_all_else_is_sent",
    ),
    Survivor(
        name="a password that is sent to a NATS server without TLS",
        edits=[("relays/nats_connection.py", "if not self.has_begun_tls:", "if False:")],
        test="tests/test_relay_nats.py::test_nothing_is_sent_without_the_tls_that_was_asked_for",
    ),
    Survivor(
        name="a refused message that counts for the breaker of its relay",
        edits=[
            (
                "worker/pauses.py",
                "decision.unavailable or (decision.spent and self._check is None)",
                "decision.outcome != 'done'",
            )
        ],
        test="tests/test_relay_core.py"
        "::test_a_refusal_is_the_messages_own_and_what_is_behind_it_goes_at_once",
    ),
    Survivor(
        name="a check that is believed though the broker takes messages",
        edits=[("worker/pauses.py", "= isinstance(error, CheckFailed)", "= False")],
        test="tests/test_relay_core.py"
        "::test_a_check_that_fails_although_the_broker_takes_messages_ends_in_a_probe",
    ),
    Survivor(
        name="a part of a secret in what is said about a relay",
        edits=[("redaction.py", "PART: Final = 6 ", "PART: Final = 60 ")],
        test="tests/test_relay_secrets.py::test_what_is_hidden",
    ),
    Survivor(
        name="events that start before an earlier one of their key is routed",
        edits=[("worker/claims.py", "if row[ROUTED_UNTIL] is not", "if 0 and row[9] is not")],
        test=f"{ROUTES}test_events_wait_until_an_earlier_one_of_their_key_is_routed",
    ),
    Survivor(
        name="further rows of an event that another worker has routed",
        edits=[("sql/settle.py", "AND routes = %s{self.skip", "AND %s <> ''{self.skip")],
        test=f"{ROUTES}test_no_row_is_inserted_twice_nor_one_of_another_receipt",
    ),
    Survivor(
        name="a further row that fails where there is one",
        edits=[("sql/settle.py", '" ON CONFLICT (id) DO NOTHING"', '""')],
        test=f"{ROUTES}test_no_row_is_inserted_twice_nor_one_of_another_receipt",
    ),
    Survivor(
        name="a row that is routed by a worker that has lost it",
        edits=[
            (
                "sql/settle.py",
                "WHERE listener IS NULL AND {held}",
                "WHERE listener IS NULL AND ({held} OR 1 = 1)",
            )
        ],
        test=f"{ROUTES}test_only_the_owner_routes_a_row_and_only_once",
    ),
    Survivor(
        name="a row that is routed twice",
        edits=[("sql/settle.py", "WHERE listener IS NULL AND {held}", "WHERE {held}")],
        test=f"{ROUTES}test_only_the_owner_routes_a_row_and_only_once",
    ),
    Survivor(
        name="a receipt that forgets what another worker has noted meanwhile",
        edits=[("sql/settle.py", 'row_lock = " FOR UPDATE"', 'row_lock = ""')],
        test=f"{ROUTES}test_a_worker_waits_until_another_has_noted_its_receipt",
        database="postgres",
    ),
    Survivor(
        name="lanes of a key that are locked before its own stream",
        edits=[
            (
                "sql/insert.py",
                "        last, seqs = self.number(own)",
                "        self.touch(in_lanes)\n        last, seqs = self.number(own)",
            )
        ],
        test=f"{ROUTES}test_writers_of_a_key_wait_in_its_own_stream_whatever_the_lanes_of_their_events",
        database="postgres",
    ),
    Survivor(
        name="a renewal that counts every lease it still finds",
        edits=[("sql/claim.py", "timedelta(seconds=lease - 0.01)", "timedelta(seconds=-lease)")],
        test="tests/conformance/test_stream_leases.py"
        "::test_a_locked_stream_is_not_renewed_because_a_renewed_one_was_released_meanwhile",
        database="postgres",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survivors", description=__doc__)
    parser.add_argument("--only", action="append", help="a part of a survivor's name")
    only = parser.parse_args().only or [""]
    chosen = [each for each in SURVIVORS if any(part in each.name for part in only)]
    for database in {each.database for each in chosen}:
        tests = [each.test for each in chosen if each.database == database]
        if fails(REPOSITORY, tests, database):
            raise RuntimeError(f"A test fails on {database} without any change; mend it first.")
    survived = 0
    for each in chosen:
        with patched_copy(each) as copy:
            caught = fails(copy, [each.test], each.database)
        survived += not caught
        print(f"{'caught' if caught else 'MISSED':<8} {each.name:<70} {each.test}", flush=True)
    return 1 if survived else 0


def fails(repository: Path, tests: Sequence[str], database: str) -> bool:
    """Return whether a test fails, run in this copy of the repository and with its package."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.where_possible", "-q", "-p", "no:cacheprovider", *tests],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(repository), "OUTBOX_TEST_DB": database},
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest itself failed on {tests}:\n{done.stdout[-3000:]}{done.stderr}")
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
