"""`python -m heddle` is `heddle`."""

import sys

from heddle.signals import Interrupted, interrupted_on_stop_signals


def main() -> None:
    """Import the command line and run it. A signal ends it in a sentence from the first import on."""
    try:
        with interrupted_on_stop_signals():
            from heddle.cli.main import main as run
    except Interrupted as interrupted:
        print(f"heddle: {interrupted}", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    run()


if __name__ == "__main__":
    main()
