"""Generated from proto/vllm/grpc/engine by `make protos`. Do not edit."""
