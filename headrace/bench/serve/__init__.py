"""`headrace bench serve`: load on an endpoint, and what its clients saw.

workload ─plan─▶ runner ──endpoint──▶ server          times, lengths and contents are fixed before the first request
                   │ records
                   ▼
summary ─▶ table, summary.json, report.html           latency counts from the moment a request was due
"""
