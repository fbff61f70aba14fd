"""The server: OpenAI's HTTP API on the engine. `heedful serve MODEL` starts it; `app.create_app` is the application."""
