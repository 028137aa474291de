"""A table of cases that one test goes through, reporting every case that fails.

Use ``@cases`` like ``@pytest.mark.parametrize`` if the cases are values of one behaviour: a test
for each of them would cost more than it asserts. Fixtures are those of the one test, so a case may
not depend on what the case before it has left.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Ids = Iterable[object] | Callable[[Any], object] | None
Failure = Exception | pytest.fail.Exception


def cases(names: str | Sequence[str], values: Iterable[Any], *, ids: Ids = None) -> Any:
    """Call the test with each of the values, which are tuples if there are several names."""
    argnames = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    rows = [(each,) if len(argnames) == 1 else tuple(each) for each in values]
    assert rows, "no case"
    titles = [*map(str, ids)] if isinstance(ids, Iterable) else [title(row, ids) for row in rows]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures: list[tuple[str, Failure]] = []
            for name, row in zip(titles, rows, strict=True):
                try:
                    test(**fixtures, **dict(zip(argnames, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - reported below
                    failures.append((name, error))
            if failures:
                raise AssertionError(report(failures, len(rows))) from failures[0][1]

        taken = inspect.signature(test)
        fixtures = [each for name, each in taken.parameters.items() if name not in argnames]
        run.__signature__ = taken.replace(parameters=fixtures)  # type: ignore[attr-defined]
        del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look for its fixtures
        return run

    return decorate


def title(row: Sequence[Any], ids: Callable[[Any], object] | None) -> str:
    return "-".join(str(ids(each)) if ids else repr(each) for each in row)


def report(failures: Sequence[tuple[str, Failure]], count: int) -> str:
    lines = [f"{name}: {type(error).__name__}: {error}" for name, error in failures]
    return "\n".join([f"{len(failures)} of {count} cases fail:", *lines])
