"""Who is compared: the versions, and where they can run."""

from __future__ import annotations

from dataclasses import dataclass

PSYCOPG = "psycopg[binary]==3.3.9"
MYSQLCLIENT = "mysqlclient==2.3.1"
EVERY = ("postgresql", "mysql", "sqlite")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One peer: its module here, what is installed, and how fast it drains by rough guess."""

    name: str
    module: str
    packages: tuple[str, ...]
    rate: int  # jobs/s; sizes its backlog, so that all drain for about as long
    vendors: tuple[str, ...] = ("postgresql",)


PEERS = (
    Peer(
        name="django-reliable-outbox",
        module="reliable_outbox",
        packages=("django-reliable-outbox[psycopg]==0.1.1", "Django==6.0.10", PSYCOPG),
        rate=2000,
    ),
    Peer(
        name="django-tasks-db",
        module="tasks_db",
        packages=("django-tasks-db==0.13.0", "Django==6.1.3", PSYCOPG, MYSQLCLIENT),
        rate=400,
        vendors=EVERY,
    ),
    Peer(
        name="procrastinate",
        module="procrastinate",
        packages=("procrastinate[django]==3.10.0", "Django==6.1.3", "uvloop==0.23.0", PSYCOPG),
        rate=600,
    ),
    Peer(
        name="Celery + Redis",
        module="celery",
        packages=("celery[redis]==5.7.0", "Django==6.1.3", PSYCOPG, MYSQLCLIENT),
        rate=1500,
        vendors=EVERY,
    ),
    Peer(
        name="pgqueuer",
        module="pgqueuer",
        packages=(
            "pgqueuer[asyncpg,psycopg]==1.6.0",
            "Django==6.1.3",
            "uvloop==0.23.0",
            "asyncpg==0.32.0",
            PSYCOPG,
        ),
        rate=20_000,
    ),
)
