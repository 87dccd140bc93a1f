"""`heddle compare`: train designs on the same data and measure their quality, its uncertainty, and their cost."""

from heddle.analysis.comparison.settings import CompareSettings


def compare(settings: CompareSettings) -> None:
    """Train designs on the same text in the same order, measure them, and write report.html and report.json."""
    from heddle.analysis.comparison.compare import compare

    compare(settings)
