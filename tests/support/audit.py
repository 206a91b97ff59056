"""The block audit that ends a test: everything was given back."""

from __future__ import annotations

from headrace.engine.block_pool import PoolAudit


def assert_sound(audit: PoolAudit) -> None:
    """Every block is accounted for, whatever is going on."""
    assert audit.problems == []
    parts = audit.free + audit.active + audit.cached + audit.held + audit.filling + audit.quarantined
    assert parts == audit.total, audit
    assert audit.host_free + audit.host_cached + audit.host_held == audit.host_total, audit


def assert_idle_pool(audit: PoolAudit) -> None:
    """Nothing runs, nothing is held: free + cached = total."""
    assert_sound(audit)
    assert (audit.active, audit.held, audit.filling, audit.quarantined) == (0, 0, 0, 0), audit
    assert audit.host_held == 0, audit
    assert audit.free + audit.cached == audit.total
