"""gRPC plumbing shared by all processes: generated stubs (`v1`), channels, servers, and the mapping of errors to status."""
