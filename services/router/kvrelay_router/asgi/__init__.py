"""The ASGI application: middleware, routes, and the fast path past FastAPI for generations."""
