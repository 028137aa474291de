"""The engine's threads: what one that keeps failing tells."""

from __future__ import annotations

import pytest

from django_outbox.engine.loops import Loop


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("outbox-default-claimer")]


@pytest.mark.any_database
def test_errors_in_a_row_are_told_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """Some eight threads of a worker meet an outage at once, and it may last for hours."""
    loop = Loop("outbox-default-claimer", lambda: 0.0, alias="default", lock_wait=1)
    for _ in range(100):
        loop._failed(ValueError("no"))
    assert [text.split(" next_try")[0] for text in told(caplog)] == [
        f"outbox-default-claimer failed error=no times={times}" for times in (1, 8, 64)
    ]


@pytest.mark.django_db
def test_the_first_error_after_a_success_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    ills = [True, False, True, False]

    def step() -> float:
        if ills.pop(0):
            raise ValueError("no")
        return 0.0

    loop = Loop("outbox-default-claimer", step, alias="default", lock_wait=1)
    while ills:
        loop._try()
    words = [text.split()[1] for text in told(caplog)]
    assert words == ["failed", "works", "failed", "works"]
