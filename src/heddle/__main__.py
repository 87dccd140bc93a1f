"""`python -m heddle` is `heddle`."""

import gc
import sys

from heddle.signals import Interrupted, end_on_stop_signals, interrupted_on_stop_signals

IMPORTED_OBJECTS = 400_000  # that torch and a verb's modules make; none is garbage, and looking for some takes 0.15 s


def main() -> None:
    """Import and run the command line. A stop signal at any time, imports included, ends it with a one-line message."""
    gc.set_threshold(IMPORTED_OBJECTS)
    gc.callbacks.append(_collect_from_now_on)
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
    finally:
        gc.freeze()  # else Python, as it ends, looks for garbage among all objects, for 0.7 s


def _collect_from_now_on(*_: object) -> None:
    """At the first collection: the next ones come sooner."""
    gc.callbacks.remove(_collect_from_now_on)
    gc.set_threshold(5_000)


if __name__ == "__main__":
    main()
