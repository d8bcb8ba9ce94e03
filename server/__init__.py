"""The OpenAI-compatible HTTP server of Albatross: `run.serve` starts it, `app.create_app` is the ASGI application alone.

It knows an engine only through `albatross.engine.client` and imports no torch.
"""
