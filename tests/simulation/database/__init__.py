"""The database backend of the simulation: Django's for SQLite, in virtual time."""
