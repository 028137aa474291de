"""``DatabaseWrapper``, which Django looks for here; ``OPTIONS["nodes"]`` are ports."""

from __future__ import annotations

import random
from typing import Any

from django.db.backends.mysql import base
from django.db.utils import DatabaseError


class DatabaseWrapper(base.DatabaseWrapper):
    nodes: list[int]

    def get_connection_params(self) -> dict[str, Any]:
        params = super().get_connection_params()
        self.nodes = params.pop("nodes")
        return params

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        refused: Exception | None = None
        for port in random.sample(self.nodes, len(self.nodes)):
            try:
                with self.wrap_database_errors:
                    found = super().get_new_connection({**conn_params, "port": port})
                    found.query("SELECT @@read_only")  # a node that has not joined refuses it
                    is_ready = str(found.store_result().fetch_row()[0][0]) == "0"
            except DatabaseError as error:
                refused = error
            else:
                if is_ready:
                    return found
                found.close()
        raise refused or self.Database.OperationalError("no node is ready")
