"""Optional integrations: logging, OpenTelemetry, Prometheus and Django tasks."""
