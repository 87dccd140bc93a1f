"""Run `transformers serve` with heddle's classes registered.

    python -m heddle.exchange.transformers.serve FOLDER --port 8000

transformers has no plug-ins. Running this module imports its package, which registers the classes.
"""

import sys


def main(arguments: list[str]) -> None:
    """Run `transformers serve` with these arguments. Needs `pip install 'heddle-lm[serve]'`."""
    from transformers.cli.transformers import app

    app(["serve", *arguments], prog_name="transformers")


if __name__ == "__main__":
    main(sys.argv[1:])
