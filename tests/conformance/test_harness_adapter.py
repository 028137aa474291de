"""The adapter for the public harness of job queues: what it reports, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from django.db import connection

from tests.benchmarks.workers import environment

pytestmark = pytest.mark.django_db(transaction=True)

METRICS = {
    "enqueue_rate",
    "completion_rate",
    "claim_p50_ms",
    "claim_p95_ms",
    "claim_p99_ms",
    "queue_depth",
    "producer_target_rate",
}


@pytest.mark.skipif(connection.vendor != "postgresql", reason="the harness knows only PostgreSQL")
def test_it_describes_itself_reports_every_metric_and_ends_when_asked() -> None:
    orders = {
        "DJANGO_SETTINGS_MODULE": "tests.benchmarks.settings",
        "PRODUCER_RATE": "50",
        "PRODUCER_BATCH_MAX": "4",
        "WORKER_COUNT": "2",
        "SAMPLE_EVERY_S": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.harness_adapter"],
        env={**environment(), **orders},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        described = json.loads(process.stdout.readline())
        assert described["kind"] == "descriptor"
        assert described["event_tables"] == ["public.outbox_event", "public.outbox_stream"]
        found: dict[str, Any] = {}
        for line in process.stdout:
            sample = json.loads(line)
            found[sample["metric"]] = sample["value"]
            if found.keys() >= METRICS and found["completion_rate"] > 0:
                break
    finally:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert found["producer_target_rate"] == 50
