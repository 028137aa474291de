"""The samples of the page about batches: an index, a projection, a warehouse."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection, models

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import write

PAGE = "how-to/deliver-in-batches.md"

pytestmark = pytest.mark.django_db


class Search(BaseHTTPRequestHandler):
    """Answers bulk requests as OpenSearch does; refuses documents without a name."""

    indexed: dict[str, Any] = {}
    requests = 0

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        items = [
            self.answer(json.loads(head), json.loads(body))
            for head, body in zip(lines[::2], lines[1::2], strict=True)
        ]
        type(self).requests += 1
        text = json.dumps({"errors": False, "items": items}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def answer(self, head: Any, body: Any) -> Any:
        if "name" not in body:
            error = {"type": "mapper_parsing_exception"}
            return {"index": {"_id": head["index"]["_id"], "status": 400, "error": error}}
        self.indexed[str(head["index"]["_id"])] = body
        return {"index": {"_id": head["index"]["_id"], "status": 201}}

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def search_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Search)
    thread = threading.Thread(target=server.serve_forever, name="search")
    thread.start()
    Search.indexed, Search.requests = {}, 0
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Stock(models.Model):
    sku = models.CharField(max_length=64, primary_key=True)
    quantity = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"


@pytest.fixture
def stock_table(transactional_db: None) -> Iterator[None]:
    with connection.schema_editor() as editor:
        editor.create_model(Stock)
    yield
    with connection.schema_editor() as editor:
        editor.delete_model(Stock)


def test_the_samples_of_deliver_in_batches(search_url: str, stock_table: None) -> None:
    loaded: list[list[Any]] = []
    warehouse = SimpleNamespace(insert=lambda table, rows: loaded.append(rows))
    shop = ModuleType("shop.models")
    vars(shop)["Stock"] = Stock
    with (
        patch.dict("sys.modules", {"shop.models": shop}),
        samples.modules(PAGE, SEARCH_URL=search_url, warehouse=warehouse),
    ):
        for payload in ({"id": 1, "name": "chair"}, {"id": 2}, {"id": 3, "name": "desk"}):
            write(1, "product.changed", payload=payload)
        write(3, "stock.moved", payload={"sku": "chair", "quantity": 2})
        write(2, "order.placed", payload={"total": 5})
        assert outbox.drain() == 8
    assert Search.requests == 1
    assert Search.indexed == {"1": {"id": 1, "name": "chair"}, "3": {"id": 3, "name": "desk"}}
    dead = OutboxEvent.objects.get(status=OutboxEvent.Status.DEAD)
    assert "mapper_parsing_exception" in (dead.last_error or "")
    assert Stock.objects.get().quantity == 6
    assert [len(rows) for rows in loaded] == [2]
