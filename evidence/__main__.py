"""`python -m evidence [ROW…]`: run rows, save the results of those that are complete, and write docs/evidence.md."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from evidence.page import write_page
from evidence.run import load_row, row_names, run_rows, save_results
from heddle.signals import Interrupted, interrupted_on_stop_signals

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs/evidence.md"


def main(command_line: Sequence[str] | None = None) -> int:
    """Parse the arguments and run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row_names())}")
    parser.add_argument("--all", action="store_true", help="all rows; the same as naming none")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="where results are kept meanwhile")
    parser.add_argument("--workers", type=int, default=1, help="one-thread processes")
    parser.add_argument("--no-training", action="store_true", help="save what is complete and write the page")
    arguments = parser.parse_args(command_line)
    unknown = sorted(set(arguments.rows) - set(row_names()))
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; choices: {', '.join(row_names())}")
    names = row_names() if arguments.all or not arguments.rows else arguments.rows
    try:
        with interrupted_on_stop_signals():
            for name in names:
                if not arguments.no_training:
                    run_rows([name], arguments.out, arguments.workers)
                save_results(name, arguments.out, RESULTS / f"{name}.json", datetime.now(UTC).date().isoformat())
                write_page(PAGE, {row: load_row(row) for row in row_names()}, RESULTS)
    except Interrupted as interruption:
        print(f"evidence: {interruption}", file=sys.stderr)
        return interruption.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
