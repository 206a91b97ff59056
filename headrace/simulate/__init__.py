"""A fleet in virtual time, for comparing policies on traces: the router's own policies, ledger, cost fits, view and
index; workers are queues whose times come from measured tables.
"""
