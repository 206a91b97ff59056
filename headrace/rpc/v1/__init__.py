"""Generated from proto/headrace/v1 by `make protos`. Do not edit."""
