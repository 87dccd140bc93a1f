"""`heddle ladder`: train designs at several sizes, and predict their loss and its cost at a larger one."""

from heddle.lab.ladder.settings import LadderSettings


def ladder(settings: LadderSettings) -> None:
    """Train designs at several sizes, fit loss over size, and predict a larger size with intervals.

    Writes ladder.html and ladder.json. Run it again to resume, or with further designs, sizes or seeds to add them.
    """
    from heddle.lab.ladder.ladder import ladder

    ladder(settings)
