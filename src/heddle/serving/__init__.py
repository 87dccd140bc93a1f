"""Serve a model over HTTP through the OpenAI API, within limits: `heddle serve`."""
