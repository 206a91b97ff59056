"""gRPC plumbing shared by all processes: generated stubs (`v1`), channels, servers, errors as status."""
