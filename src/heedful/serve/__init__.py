"""The server: OpenAI's HTTP API on the engine. `heedful serve MODEL` starts it; `app.create_app` is the application.

server, app, options          the process, the ASGI application, the options of both
protocol, middleware, errors  connections and their limits; access control; error responses
request_schema, response_schema
                              the bodies, as pydantic models
completions, chat, embeddings, models, tokenize, metrics
                              the endpoints
generation, logprobs          what completions and chats share: dispatch, streaming, formatting
worker, handle                the engine's thread, and handles to what was submitted to it
model_manager, memory         loading and evicting models within a memory budget
batch, batch_files, ray_batch OpenAI's batch files, answered by the application without a socket; on a Ray cluster
playground/                   the page and its API
"""
