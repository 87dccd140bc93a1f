"""The page of an engine that was run on a conformance kit."""

from collections import Counter
from collections.abc import Sequence

from heddle.lab.conformance.run import NOT_SEEN, PROPERTIES, WRONG, Finding, statuses
from heddle.lab.pages.render import render


def conformance_page(engine: str, precision: str, findings: Sequence[Finding]) -> str:
    """The page as one HTML document; the same findings give the same bytes."""
    return render(
        "conformance.html",
        title=f"Conformance of {engine}",
        engine=engine,
        precision=precision,
        cases=len(findings),
        properties=[name for name in PROPERTIES if any(each.property == name for each in findings)],
        models=statuses(findings),
        wrong=[each for each in findings if each.status == WRONG],
        reasons=Counter(each.reason for each in findings if each.status == NOT_SEEN),
    )
