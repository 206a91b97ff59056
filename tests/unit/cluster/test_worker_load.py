"""The load that a worker publishes is told apart by router, and bounded."""

from headrace.cluster.worker_process import by_router
from headrace.directory.records import RouterShare
from headrace.engine.scheduler import Share


def test_each_router_has_its_share():
    shares = by_router({"a": Share(1, 10, 0), "b": Share(2, 30, 20)})
    assert shares == (RouterShare("b", 2, 30, 20), RouterShare("a", 1, 10, 0))


def test_of_many_routers_the_smallest_are_one():
    shares = by_router({f"r{n}": Share(1, 10, n) for n in range(100)})
    assert len(shares) == 65
    assert shares[0] == RouterShare("r99", 1, 10, 99)
    assert shares[-1] == RouterShare("", 36, 360, sum(range(36)))
