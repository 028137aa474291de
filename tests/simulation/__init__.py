"""A deterministic simulation: real workers in virtual time, judged by an oracle.

One seed is one history: which workers run, what fails, who runs next at each lock, wait and
statement. The same seed gives the same history, so every violation can be replayed.

``python -m tests.simulation SEED [COUNT]`` runs histories; ``--trace`` prints one.
"""
