"""Sends every event on to a message broker or a webhook; off unless ``RELAY_URL`` names one."""
