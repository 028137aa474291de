"""The engine's threads: what one that keeps failing tells, and when it tries again."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test import override_settings

from django_outbox.worker.connection_cleanup import BrokenSessions
from django_outbox.worker.effects import act
from django_outbox.worker.polling import Wakeup
from django_outbox.worker.threads import DoorbellListener, Loop


def told(caplog: pytest.LogCaptureFixture, who: str = "claimer") -> list[str]:
    return [text for text in caplog.messages if text.startswith(f"outbox-default-{who}")]


def test_errors_in_a_row_are_told_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """Some eight threads of a worker meet an outage at once, and it may last for hours."""
    loop = Loop("outbox-default-claimer", lambda: act(float), alias="default")
    for _ in range(100):
        loop._handle_error(ValueError("no"))
    assert [text.split(" next_try")[0] for text in told(caplog)] == [
        f"outbox-default-claimer failed error=no times={times}" for times in (1, 8, 64)
    ]


@pytest.mark.parametrize(("lease", "most"), [(60.0, 1.0), (6.0, 1.0), (3.0, 0.5)])
def test_the_pause_after_errors_leaves_time_for_the_lease(
    caplog: pytest.LogCaptureFixture, lease: float, most: float
) -> None:
    """No thread sleeps for longer than the heartbeat does, so that it renews what it can.

    Nor for longer than a second: a standby that has taken over is to be found soon.
    """
    loop = Loop("outbox-default-heartbeat", lambda: act(float), alias="default")
    with override_settings(OUTBOX={"LEASE": lease}):
        pauses = [loop._handle_error(ValueError("no")) for _ in range(64)]
    assert pauses[0] <= 0.12
    assert 0.8 * most <= min(pauses[10:]) <= max(pauses[10:]) <= 1.2 * most
    assert told(caplog, "heartbeat")[-1].endswith(f"next_try={most:.1f}s")


@pytest.mark.django_db
def test_the_first_error_after_a_success_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    ills = [True, False, True, False]

    def answer() -> float:
        if ills.pop(0):
            raise ValueError("no")
        return 0.0

    loop = Loop("outbox-default-claimer", lambda: act(answer), alias="default")
    while ills:
        loop._run_step()
    words = [text.split()[1] for text in told(caplog)]
    assert words == ["failed", "works", "failed", "works"]


@pytest.mark.django_db
def test_all_connect_anew_where_one_session_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only reads would stay with a server that takes no writes any more."""
    sessions, connected = BrokenSessions(), list[str]()
    keeper = Loop("outbox-default-keeper", lambda: act(float), alias="default", sessions=sessions)
    monkeypatch.setattr(connections["default"], "close", lambda: connected.append("closed"))
    monkeypatch.setattr(connections["default"], "ensure_connection", lambda: connected.append("to"))
    keeper._run_step()
    assert not connected
    broken = Loop("outbox-default-broken", lambda: act(float), alias="default", sessions=sessions)
    broken._handle_error(OperationalError("the server has gone away"))
    del connected[:]
    keeper._run_step()
    keeper._run_step()
    assert connected == ["closed", "to"]


def test_the_doorbell_listens_anew_where_a_session_broke() -> None:
    calls, sessions = list[str](), BrokenSessions()

    class Ear:
        sure = True

        def listen(self) -> None:
            calls.append("listen")

        def wait(self, timeout: float) -> bool:
            return False

    bell: Any = DoorbellListener(Ear(), interval=0.1, wakeup=Wakeup(), sessions=sessions)  # type: ignore[arg-type]
    for _ in range(2):
        [step(None) for step in bell.step()]
    assert calls == ["listen"]
    sessions.report_broken()
    for _ in range(2):
        [step(None) for step in bell.step()]
    assert calls == ["listen", "listen"]
