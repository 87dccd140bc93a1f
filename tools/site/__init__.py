"""The documentation as a folder of pages that need no network: `make docs`, or `python -m tools.site build/docs`."""
