"""Tests of single functions and classes, without a database and without threads."""
