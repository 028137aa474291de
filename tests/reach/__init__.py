"""A small site whose processes the tests start as a user would: workers and web servers."""
