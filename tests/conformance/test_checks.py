"""Checks of what a server is set to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.core.checks import run_checks
from django.db import connections
from django.test import override_settings

from tests.test_checks import ids, ours
from tests.test_checks_servers import found


@pytest.mark.django_db(databases=["default", "other"])
def test_no_database_is_warned_of_conditional_indexes() -> None:
    """MariaDB would cause models.W037."""
    found = run_checks(databases=[*connections])
    assert [each for each in found if "django_outbox" in str(each.obj)] == []
    assert "models.W037" not in {each.id for each in found}


@pytest.fixture
def strict(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[str | None]:
    """Make the connection REPEATABLE READ; return the level that the check should report."""
    plain = connections["default"]
    strict = plain.copy()
    options = {**strict.settings_dict["OPTIONS"]}
    if plain.vendor == "postgresql":
        options["isolation_level"] = 3  # psycopg's REPEATABLE READ
    elif plain.vendor == "mysql":
        options |= {
            "isolation_level": "repeatable read",
            "init_command": "SET autocommit = 1 /*M! , SESSION innodb_snapshot_isolation = ON */",
        }
    strict.settings_dict["OPTIONS"] = options
    connections["default"] = strict
    # SQLite has no levels, and MySQL's lets a second writer of a row through.
    fails = plain.vendor == "postgresql" or getattr(plain, "mysql_is_mariadb", False)
    yield "REPEATABLE READ" if fails else None
    strict.close()
    connections["default"] = plain


def strictness() -> list[str]:
    return [each.msg for each in ours(["default"]) if each.id == "django_outbox.W026"]


@override_settings(OUTBOX={"MODE": "ordered"})
def test_w026_transactions_in_which_a_second_writer_of_a_key_fails(strict: str | None) -> None:
    found = strictness()
    assert len(found) == (strict is not None)
    assert all(f"are {strict}." in text for text in found)


def test_w026_is_for_those_whose_every_event_has_a_key(strict: str | None) -> None:
    assert strictness() == []


@pytest.mark.django_db
@override_settings(OUTBOX={"MODE": "ordered"})
def test_w026_is_not_for_read_committed() -> None:
    assert strictness() == []


@pytest.mark.django_db
@pytest.mark.skipif(connections["default"].vendor != "mysql", reason="only MySQL has such a limit")
def test_a_payload_that_the_server_would_not_take() -> None:
    with override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 2**20}):
        assert "django_outbox.W027" not in ids(["default"])
    with override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 2**30}):
        (found,) = [each for each in ours(["default"]) if each.id == "django_outbox.W027"]
    assert "max_allowed_packet" in found.msg
    assert str(2**30) in found.msg


@pytest.mark.django_db
def test_the_server_of_the_tests_is_supported() -> None:
    assert found("E024", "E028", "W025", "W054") == []
