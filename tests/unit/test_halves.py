"""``Halving``: which parts of a failed batch are called again, and which calls count."""

from __future__ import annotations

from django_outbox.delivery.decide import Halving

BROKEN = ValueError("the listener fails")


def called(batch: str, *endings: BaseException | None) -> list[str]:
    """Return the parts of a batch that are called if the calls end like this, in turn."""
    halving, found = Halving([*batch]), list[str]()
    for part, ending in zip(halving, endings, strict=True):
        found.append("".join(part))
        halving.note(part, ending)
    return found


def test_two_halves_that_fail_alike_end_it() -> None:
    assert called("abcd", BROKEN, BROKEN, BROKEN) == ["abcd", "ab", "cd"]
