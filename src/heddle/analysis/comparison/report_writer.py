"""The report of a comparison that runs: written before the first training, and again after its tasks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from heddle.analysis.comparison.report import comparison_report, design_facts
from heddle.analysis.comparison.results import Results
from heddle.analysis.comparison.tasks import Comparison
from heddle.analysis.comparison.text_profile import describe_profile
from heddle.analysis.live import LivePage
from heddle.analysis.pages.report import report_json, report_page, write_report
from heddle.errors import HeddleError
from heddle.storage.lock import InUseError, lock_output, wait_for_lock

REPORT_FILES = ("report.json", "report.html")
SLOW_REPORT_SECONDS, MAX_REPORT_SHARE = 1.0, 0.05


class ReportWriter:
    """Writes the report of a comparison in its present state, and shows it on the live page.

    Where other processes work on the comparison too, each writes what it knows, and the last one knows all.
    """

    def __init__(self, comparison: Comparison, results: Results, live: LivePage | None) -> None:
        self.comparison, self.results, self.live = comparison, results, live
        self.seconds = self.written_at = 0.0
        self.find_facts()

    def find_facts(self) -> None:
        """Compute what needs no training; again once the vocabulary is known."""
        entries = self.comparison.plan.entries
        self.results.facts = {entry.name: design_facts(self.comparison, entry) for entry in entries}
        if self.comparison.corpus is not None:
            length = self.comparison.plan.sequence_length
            self.results.loss_groups = describe_profile(self.comparison.corpus, length)

    def write(self) -> dict[str, Any]:
        """Write the report, show it, and return it."""
        is_shared = self.comparison.workers.share is not None
        with wait_for_lock(self.comparison.out / REPORT_FILES[0]) if is_shared else nullcontext():
            return self._write()

    def _write(self) -> dict[str, Any]:
        started = time.monotonic()
        report = comparison_report(self.comparison, self.results)
        write_report(report, self.comparison.out)
        if self.live is not None:
            self.live.publish(
                lambda revision: report_page(report, revision), lambda: report_json(report), report["progress"]
            )
        self.written_at = time.monotonic()
        self.seconds = self.written_at - started
        return report

    def update(self) -> None:
        """Write the report after a task, but not all the time where it has very many designs, or many processes do."""
        is_shared = self.comparison.workers.share is not None
        limit = MAX_REPORT_SHARE * (time.monotonic() - self.written_at)
        if not is_shared and self.seconds < max(SLOW_REPORT_SECONDS, limit):
            self._write()
        elif is_shared and self.seconds < limit:
            with suppress(InUseError), lock_output(self.comparison.out / REPORT_FILES[0]):
                self._write()

    @contextmanager
    def first_report(self) -> Iterator[None]:
        """Write the report of a new comparison before the block, in which its text is prepared, which may take a while.

        Where the block refuses the text or the budget, no report remains.
        """
        files = [self.comparison.out / name for name in REPORT_FILES]
        if any(file.exists() for file in files):
            yield
            return
        self.write()
        try:
            yield
        except HeddleError:
            for file in files:
                file.unlink(missing_ok=True)
            raise
