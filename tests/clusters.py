"""Clusters of private servers: a PostgreSQL pair, MariaDB Galera, MySQL Group Replication.

A node can be killed and come back. ``way`` is what Django's settings need to reach the others.
``python -m tests.clusters KIND COMMAND…`` runs a command, such as pytest, on one.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from abc import abstractmethod
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from tests import debian, servers
from tests.brokers import free_port
from tests.waiting import wait_until

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")
OWNER = "mysql"  # the user that the package makes
JOIN = 60.0  # seconds that a node gets to catch up with the others
ANY_NODE = "tests.faults.any_node"  # a backend of Django: each connection is to a random node
NODES = 3
VENDORS = {"pair": "postgres", "galera": "mariadb", "group": "mysql"}


def make(kind: str, directory: Path) -> Any:
    """Prepare a cluster without starting it; raise ``debian.Unavailable`` if that is impossible."""
    return {"pair": Pair, "galera": Galera, "group": Group}[kind](directory)


# -- PostgreSQL ------------------------------------------------------------------------------------


class Pair:
    """A primary, and a standby that has what the primary has committed."""

    def __init__(self, directory: Path) -> None:
        first = directory / "first"
        first.mkdir()
        self._directory, self._count = directory, 0
        self._tools = servers.Postgres(first).tools
        self._data = [first / "postgres", directory / "none"]
        self.ports = [free_port(), free_port()]
        self.primary = 0  # which of the two
        self.url = ""
        self.way = {
            "HOST": "127.0.0.1,127.0.0.1",
            "PORT": ",".join(map(str, self.ports)),
            "OPTIONS": {"target_session_attrs": "read-write", "connect_timeout": 2},
        }
        self._configure(0, "wal_keep_size = '256MB'", "listen_addresses = '127.0.0.1'")
        self._configure(0, "unix_socket_directories = ''", "wal_retrieve_retry_interval = 200")

    def start(self) -> None:
        self._run(0)
        self.join()
        self.url = f"postgres://postgres@127.0.0.1:{self.ports[0]}/postgres"

    def stop(self, how: str = "immediate") -> None:
        for node in 0, 1:
            if self._listens(node):
                self._pg("pg_ctl", "-w", "-D", self._data[node], "-m", how, "stop")

    def kill(self) -> None:
        """End all processes of the primary at the same moment, as a machine that is lost does.

        Backends that outlive the first process would show each other commits that no standby has.
        """
        file = self._data[self.primary] / "postmaster.pid"
        first = psutil.Process(int(file.read_text().split()[0]))
        first.suspend()  # it starts no others
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for each in (first, *first.children(recursive=True)):
                act(each)

    def freeze(self) -> None:
        """Have the primary take no writes any more, its sessions open."""
        self._sql(self.primary, "ALTER SYSTEM SET default_transaction_read_only = on")
        self._sql(self.primary, "SELECT pg_reload_conf()")

    def promote(self) -> None:
        """Make the standby the primary."""
        self.primary = 1 - self.primary
        self._pg("pg_ctl", "-w", "-D", self._data[self.primary], "promote")
        self._sql(self.primary, "ALTER SYSTEM SET synchronous_standby_names = ''")
        self._sql(self.primary, "SELECT pg_reload_conf()")

    def join(self) -> None:
        """Make the other server anew: a standby of the primary."""
        node, source = 1 - self.primary, self._data[self.primary]
        if self._listens(node):
            self._pg("pg_ctl", "-w", "-D", self._data[node], "-m", "immediate", "stop")
        wait_until(lambda: not self._listens(node), within=30, what="the port is free")
        self._count += 1
        self._data[node] = self._directory / f"standby-{self._count}"
        place = ["-h", "127.0.0.1", "-p", self.ports[self.primary], "-U", "postgres"]
        self._data[node].mkdir(mode=0o700)
        shutil.copystat(source, self._data[node])
        shutil.chown(self._data[node], source.owner())
        self._pg(
            "pg_basebackup", *place, "-D", self._data[node], "-R", "-X", "stream", "-c", "fast"
        )
        self._run(node)
        self._sql(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._sql(self.primary, "SELECT pg_reload_conf()")
        asked = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(lambda: self._sql(self.primary, asked) == [(1,)], within=30, what="a standby")

    def _configure(self, node: int, line: str, *more: str) -> None:
        with (self._data[node] / "postgresql.conf").open("a") as file:
            file.writelines(f"{each}\n" for each in (line, *more))

    def _run(self, node: int) -> None:
        self._configure(node, f"port = {self.ports[node]}")
        log = self._data[node].parent / f"log-{node}"
        log.touch()
        shutil.chown(log, self._data[node].owner())
        self._pg("pg_ctl", "-w", "-D", self._data[node], "-l", log, "start")

    def _pg(self, program: str, *arguments: object) -> None:
        self._tools(program, *map(str, arguments))

    def _listens(self, node: int) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[node]), 1):
            return True
        return False

    def _sql(self, node: int, sql: str) -> list[Any]:
        import psycopg

        place = {"host": "127.0.0.1", "port": self.ports[node], "user": "postgres"}
        with psycopg.connect(autocommit=True, dbname="postgres", **place) as session:
            found = session.execute(sql)  # type: ignore[call-overload]
            return [*found.fetchall()] if found.description else []


# -- MySQL and MariaDB -----------------------------------------------------------------------------


class Nodes:
    """Nodes that all take writes; node 0 is never killed, so that there always is a majority."""

    def __init__(self, directory: Path) -> None:
        self._nodes = [self._node(directory, number) for number in range(NODES)]
        self.url = ""
        self.ports = [each.port for each in self._nodes]
        self.way = {"ENGINE": ANY_NODE, "OPTIONS": {"charset": "utf8mb4", "nodes": self.ports}}

    @abstractmethod
    def _node(self, directory: Path, number: int) -> Any:
        """Prepare a node."""

    def start(self) -> None:
        for number in range(NODES):
            self.join(number)
        self.url = f"mysql://root@127.0.0.1:{self.ports[0]}/own"

    def join(self, number: int) -> None:
        """Start a node, and wait until it has caught up with the others."""
        self._nodes[number].begin(is_first=number == 0)
        wait_until(self._nodes[number].is_ready, within=JOIN, what=f"node {number} joins")

    def kill(self, number: int) -> None:
        """End a node at once."""
        self._nodes[number].stop("kill")

    def stop(self, how: str = "kill") -> None:
        for each in self._nodes:
            each.stop(how)


class GaleraNode(servers.MariaDB):
    def __init__(self, directory: Path, number: int, addresses: list[int]) -> None:
        place = directory / f"node-{number}"
        place.mkdir()
        mine, ist, sst = addresses[number], free_port(), free_port()
        seeds = ",".join(f"127.0.0.1:{each}" for each in addresses)
        provider = f"base_port={mine};ist.recv_addr=127.0.0.1:{ist};gcache.size=64M"
        self._wsrep = [
            *("--binlog-format=ROW", "--innodb-autoinc-lock-mode=2", "--wsrep-on=ON"),
            *(f"--wsrep-provider={PROVIDER}", "--wsrep-cluster-name=tests"),
            *(f"--wsrep-cluster-address=gcomm://{seeds}", f"--wsrep-node-name=node-{number}"),
            *(f"--wsrep-node-address=127.0.0.1:{mine}", "--wsrep-sst-method=rsync"),
            *(f"--wsrep-sst-receive-address=127.0.0.1:{sst}", "--wsrep-slave-threads=2"),
            f"--wsrep-provider-options={provider};pc.recovery=false",
        ]
        super().__init__(place)
        if os.geteuid() == 0:  # whose rsync would be nobody's
            directory.chmod(0o755)
            for each in (place, *place.rglob("*")):
                shutil.chown(each, OWNER)

    def serving(self, common: list[str], *, durable: bool) -> list[str]:
        mine = [f"--user={OWNER}" if each == "--user=root" else each for each in common]
        return [*super().serving(mine, durable=durable), *self._wsrep]

    def begin(self, *, is_first: bool) -> None:
        self.launch(*["--wsrep-new-cluster"] * is_first)

    def is_ready(self) -> bool:
        with suppress(Exception), closing(self.session()) as session:
            session.query("CREATE DATABASE IF NOT EXISTS own")
            session.query("SHOW STATUS LIKE 'wsrep_local_state_comment'")
            return session.store_result().fetch_row()[0][1] in (b"Synced", "Synced")
        return False


class Galera(Nodes):
    def __init__(self, directory: Path) -> None:
        if not PROVIDER.exists() or not shutil.which("rsync"):
            raise debian.Unavailable("galera-4 and rsync are not installed")
        self._addresses = [free_port() for _ in range(NODES)]
        super().__init__(directory)

    def _node(self, directory: Path, number: int) -> GaleraNode:
        return GaleraNode(directory, number, self._addresses)


RIGHTS = "REPLICATION SLAVE, BACKUP_ADMIN, GROUP_REPLICATION_STREAM, CONNECTION_ADMIN"
SOURCE = "SOURCE_USER = 'rpl', SOURCE_PASSWORD = 'r' FOR CHANNEL 'group_replication_recovery'"
SETS_UP = (
    "SET sql_log_bin = 0",
    "CREATE USER rpl@'%' IDENTIFIED BY 'r'",
    f"GRANT {RIGHTS} ON *.* TO rpl@'%'",
    "SET sql_log_bin = 1",
    f"CHANGE REPLICATION SOURCE TO {SOURCE}",
)
NO_MEMBER = 3092  # an error: the group refuses the node


class GroupNode(servers.MySQL):
    def __init__(self, directory: Path, number: int, addresses: list[int]) -> None:
        place = directory / f"node-{number}"
        place.mkdir()
        seeds = ",".join(f"127.0.0.1:{each}" for each in addresses)
        group = {
            "group-name": "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa",
            "start-on-boot": "OFF",
            "local-address": f"127.0.0.1:{addresses[number]}",
            "group-seeds": seeds,
            "single-primary-mode": "OFF",
            "enforce-update-everywhere-checks": "ON",
            "recovery-get-public-key": "ON",
        }
        self._group = [
            *(f"--server-id={number + 1}", "--gtid-mode=ON", "--enforce-gtid-consistency=ON"),
            *("--report-host=127.0.0.1", "--plugin-load-add=group_replication.so"),
            *(f"--loose-group-replication-{name}={value}" for name, value in group.items()),
        ]
        self._is_new = True
        super().__init__(place)

    def serving(self, common: list[str], *, durable: bool) -> list[str]:
        return [*super().serving(common, durable=durable), *self._group]

    def begin(self, *, is_first: bool) -> None:
        self.launch()
        wait_until(self._answers_at_all, within=servers.START_DEADLINE, what="the node answers")
        with closing(self.session()) as session:
            for each in SETS_UP if self._is_new else ():
                session.query(each)
            self._is_new = False
            session.query(f"SET GLOBAL group_replication_bootstrap_group = {int(is_first)}")
            wait_until(lambda: joins(session), within=JOIN, what="the node is a member")
            session.query("SET GLOBAL group_replication_bootstrap_group = 0")

    def _answers_at_all(self) -> bool:
        with suppress(Exception), closing(self.session()):
            return True
        return False

    def is_ready(self) -> bool:
        with suppress(Exception), closing(self.session()) as session:
            session.query("CREATE DATABASE IF NOT EXISTS own")
            session.query(
                "SELECT member_state FROM performance_schema.replication_group_members"
                " WHERE member_id = @@server_uuid"
            )
            return session.store_result().fetch_row()[0][0] in (b"ONLINE", "ONLINE")
        return False


def joins(session: Any) -> bool:
    """Join the group; return False while it still has what this node was before."""
    try:
        session.query("START GROUP_REPLICATION")
    except session.OperationalError as error:
        if error.args[0] != NO_MEMBER:
            raise
        return False
    return True


class Group(Nodes):
    def __init__(self, directory: Path) -> None:
        self._addresses = [free_port() for _ in range(NODES)]
        super().__init__(directory)

    def _node(self, directory: Path, number: int) -> GroupNode:
        return GroupNode(directory, number, self._addresses)


def main(kind: str, *command: str) -> int:
    """Run a command on a node of a cluster; of a pair, on the standby that has taken over."""
    with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as place:
        cluster = make(kind, Path(place))
        try:
            cluster.start()
            if kind == "pair":
                cluster.kill()
                cluster.promote()
                cluster.join()
                cluster.url = f"postgres://postgres@127.0.0.1:{cluster.ports[1]}/postgres"
            found = {"OUTBOX_TEST_DB": VENDORS[kind], "DATABASE_URL": cluster.url}
            return subprocess.run(command, env={**os.environ, **found}, check=False).returncode
        finally:
            cluster.stop()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
