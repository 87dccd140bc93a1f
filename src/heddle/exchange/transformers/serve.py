"""`transformers serve` with heddle's classes known to it: `python -m heddle.exchange.transformers.serve FOLDER --port 8000`.

transformers looks for no plug-ins; running this module imports its package, which registers the classes.
"""

import sys


def main(words: list[str]) -> None:
    """Serve as `transformers serve` with these words after it; needs `pip install 'heddle-lm[serve]'`."""
    from transformers.cli.transformers import app

    app(["serve", *words], prog_name="transformers")


if __name__ == "__main__":
    main(sys.argv[1:])
