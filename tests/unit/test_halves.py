"""``Halving``: which parts of a failed batch are called again, and which calls count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from django_outbox.delivery.halves import Halving

BROKEN = ValueError("the listener fails")


def called(batch: str, *endings: BaseException | str | None) -> list[str]:
    """Return the parts of a batch that are called if the calls end like this, in turn.

    An ending is an error, None, or what is left of a part whose call did not count.
    """
    halving, found = Halving([*batch]), list[str]()
    for part, ending in zip(halving, endings, strict=True):
        found.append("".join(part))
        if isinstance(ending, str):
            halving.again([*ending])
        else:
            halving.note(part, ending)
    return found


def test_two_halves_that_fail_alike_end_it() -> None:
    assert called("abcd", BROKEN, BROKEN, BROKEN) == ["abcd", "ab", "cd"]


@pytest.mark.parametrize(
    ("endings", "parts"),
    [
        (["abc", BROKEN, BROKEN, BROKEN], ["abcd", "abc", "ab", "c"]),
        ([BROKEN, "a", BROKEN, BROKEN], ["abcd", "ab", "a", "cd"]),
        ([BROKEN, BROKEN, "d", BROKEN], ["abcd", "ab", "cd", "d"]),
        ([BROKEN, "b", "b", BROKEN, BROKEN], ["abcd", "ab", "b", "b", "cd"]),
        ([BROKEN, "a", None, BROKEN, BROKEN, None], ["abcd", "ab", "a", "cd", "c", "d"]),
    ],
    ids=["whole", "first half", "second half", "twice", "half that succeeds then"],
)
def test_a_repeated_part_counts_once_and_is_called_next(
    endings: Sequence[BaseException | str | None], parts: list[str]
) -> None:
    assert called("abcd", *endings) == parts
