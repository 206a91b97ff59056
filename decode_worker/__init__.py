"""The decode role: owns requests, pulls their KV from prefill workers, decodes in a continuous batch, streams."""
