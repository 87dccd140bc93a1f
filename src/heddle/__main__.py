"""`python -m heddle` is `heddle`."""

import gc
import sys

from heddle.signals import Interrupted, end_on_stop_signals, interrupted_on_stop_signals


def main() -> None:
    """Import and run the command line. A stop signal at any time, imports included, ends it with a one-line message."""
    gc.set_threshold(5_000)  # torch's imports make many objects and no garbage: collecting seldom saves 0.15 s
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
