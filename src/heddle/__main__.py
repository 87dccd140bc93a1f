"""`python -m heddle` is `heddle`."""

import sys

from heddle.signals import Interrupted, end_on_stop_signals, interrupted_on_stop_signals


def main() -> None:
    """Import and run the command line. A stop signal at any time, imports included, ends it with a one-line message."""
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
