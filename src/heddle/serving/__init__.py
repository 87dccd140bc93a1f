"""Serve a model over HTTP with OpenAI's interface, within limits: `heddle serve`."""
