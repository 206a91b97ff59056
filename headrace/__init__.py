"""Shared library of Headrace: engine, tokenizer, directory, RPC plumbing, cluster and command line."""
