"""Views that write: what a request changes and what it announces commit together."""

from __future__ import annotations

import os
import threading

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

import django_outbox as outbox
from tests.reach.effects import session
from tests.testapp.models import Order


@csrf_exempt
def write(request: HttpRequest) -> JsonResponse:
    """Write ``count`` events of one type, whose listeners take ``seconds``."""
    kind, count = request.GET.get("type", "reach.noted"), int(request.GET.get("count", 1))
    payload = {"seconds": float(request.GET.get("seconds", 0))}
    with transaction.atomic():
        order = Order.objects.create(sku="B-7")
        ids = [outbox.write(kind, payload, aggregate=order) for _ in range(count)]
    return JsonResponse({"ids": ids, "pid": os.getpid(), "session": session()})


@csrf_exempt
def fail(request: HttpRequest) -> JsonResponse:
    """Write, then fail; with ATOMIC_REQUESTS nothing of it commits."""
    outbox.write("reach.noted", {})
    raise RuntimeError("after the write")


@csrf_exempt
def write_bare(request: HttpRequest) -> JsonResponse:
    """Write without a transaction of the view's own; ATOMIC_REQUESTS gives it one."""
    return JsonResponse({"ids": [outbox.write("reach.noted", {})]})


def threads(request: HttpRequest) -> JsonResponse:
    return JsonResponse(
        {"pid": os.getpid(), "names": [each.name for each in threading.enumerate()]}
    )


urlpatterns = [
    path("write", write),
    path("bare", write_bare),
    path("fail", fail),
    path("threads", threads),
]
