"""Replays by the beginning of an error, in each way that MySQL reads a backslash."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from tests.table import dead
from tests.test_batch_commands import replay

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["", "NO_BACKSLASH_ESCAPES"])
def sql_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """MySQL's default, and a mode in which a backslash is an ordinary character."""
    if not request.param:
        yield
        return
    if connection.vendor != "mysql":
        pytest.skip("a mode of MySQL and MariaDB")
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_mode = CONCAT(@@sql_mode, %s)", [f",{request.param}"])
    yield
    connection.close()


ERRORS = ("my_app.Refused", "my%app.Refused", "myxapp.Refused", "MY_APP.Refused", "x my_app.", None)


@pytest.mark.parametrize("begins", ["my_app", "my%app", "my_app.Refused", "", "\\", "x"])
def test_an_error_begins_with_just_that(begins: str, sql_mode: None) -> None:
    for error in ERRORS:
        dead(1, last_error=error)
    fitting = sum(each is not None and each.startswith(begins) for each in ERRORS)
    assert replay("--error", begins) == f"replayed {fitting}"
