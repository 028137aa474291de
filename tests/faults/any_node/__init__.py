"""A database backend of Django that connects to any of several MySQL or MariaDB nodes.

It is what a balancer in front of a cluster does: each connection is to a random node that answers.
"""
