"""Listeners: registration and routing, return values, progress and retry policies."""
