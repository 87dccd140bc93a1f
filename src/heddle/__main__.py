"""`python -m heddle` is `heddle`."""

import sys

from heddle.signals import Interrupted, end_on_stop_signals, interrupted_on_stop_signals


def main() -> None:
    """Import the command line and run it. A signal ends it in a sentence from the first import to the end."""
    try:
        with interrupted_on_stop_signals():
            try:
                from heddle.cli.main import main as run

                run()
            finally:
                end_on_stop_signals()
    except Interrupted as interrupted:
        print(f"heddle: {interrupted}", file=sys.stderr)
        sys.exit(interrupted.exit_code)


if __name__ == "__main__":
    main()
