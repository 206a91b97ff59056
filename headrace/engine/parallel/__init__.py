"""Tensor parallelism: several processes, the ranks, compute one model's steps together, each with a shard of it.

    rank 0    engine ─▶ runner ─▶ ParallelForward ── one message a step ──▶ rank 1, 2, …    follow
                                       └────────── sums, logits (gloo) ─────────────┘

Rank 0 is the engine; it alone schedules and samples. The others hold their shard of the weights and of the KV, under
the same block ids, and do what they are told. Lock-step: all do the same in the same order, so when one is lost the
others can not go on, and the whole worker ends.
"""
