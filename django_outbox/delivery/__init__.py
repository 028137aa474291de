"""Deliver one event: route it, call its listeners and decide the outcome."""
