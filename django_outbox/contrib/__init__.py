"""Optional integrations: logging, locale, OpenTelemetry, Prometheus and Django tasks."""
