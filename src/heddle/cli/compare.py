"""`heddle compare`: train designs on the same data and measure their quality, its uncertainty, and their cost."""

from heddle.lab.compare.settings import CompareSettings


def compare(settings: CompareSettings) -> None:
    """Train designs on the same text in the same order, measure them, and write report.html and report.json."""
    from heddle.lab.compare.compare import compare

    compare(settings)
