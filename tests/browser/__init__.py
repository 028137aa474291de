"""Pages in a real browser: ``tox -e browser``."""
