"""What papers found about parts of language models, and what heddle finds at a small size: `python -m evidence`."""
