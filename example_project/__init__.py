"""A small tea shop that delivers its events through django_outbox."""
