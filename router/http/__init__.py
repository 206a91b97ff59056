"""The OpenAI-compatible HTTP entrance. Converts JSON to `GenerateRequest` and updates to JSON; decides nothing.

connection.py   connections: how many, and how long they may take
call.py         one HTTP request: body, deadline, answer, errors, a client that leaves
bodies.py       the JSON that clients send, as pydantic models
convert.py      … and what it means as a GenerateRequest
replies.py      updates as chunks of a stream, which also make up the answers that are not streamed
tool_calls.py   calls that the model writes into its text
generate.py     /v1/completions and /v1/chat/completions
routes.py       everything else, and the application
server.py       start and stop
"""
