"""Looks at the table and at who listens, for people: bounded, and nothing is delivered here."""
