"""The fault harness: real processes are broken on purpose, and a witness is asked what came of it.

``python -m tests.faults --db postgres --scenario kill --seed 7 --size ci`` runs one scenario on a
server of its own. Business processes write events through ``write()`` and beside each, in the same
transaction, what they intend; worker processes (``manage.py outbox_worker``) deliver them to
listeners that leave a line in a file, where no fault of a database reaches it. At the end intents,
lines, faults and rows are put side by side (``oracle``).
"""
