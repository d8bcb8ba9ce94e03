"""The routes: `generation` as raw ASGI handlers, every other one as a FastAPI router built from the server's state."""
