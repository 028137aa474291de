"""What every event and every job of the benchmarks carries: about 300 bytes as JSON."""

PAYLOAD = {
    "sku": "teapot",
    "quantity": 3,
    "address": {"street": "x" * 40, "zip": "12345"},
    "lines": [{"number": n, "text": f"item {n}", "price": 1.5} for n in range(4)],
}
