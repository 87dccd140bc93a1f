"""Pages without plotly."""

from tests.light_pages import light_pages

__all__ = ["light_pages"]
