"""The prefill role: computes prompts for decode workers and holds the blocks until they are read."""
