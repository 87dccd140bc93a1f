"""`heddle judge`: a stream of proposals, each judged against the incumbent, with the error of all verdicts bounded."""

import json

import click

from heddle.lab.judge.settings import JudgeSettings
from heddle.progress import print_text, printable

EXIT_CODES = {"better": 0, "no clear difference": 3, "worse": 4, "refused": 5}


def judge(settings: JudgeSettings) -> None:
    """Judge proposals one after another: `init` makes a ledger, `submit` gives a verdict, `show` and `final` sum up.

    A proposal is trained beside the incumbent on fresh seeds and scored on fresh held-out text. Submit a killed
    submission again, and it continues. Exit code of `submit`: 0 better, 3 no clear difference, 4 worse, 5 refused.
    `mcp` serves `submit` and `show` as tools of the Model Context Protocol, on stdin and stdout.
    """
    from heddle.lab.judge.judge import describe, judge

    result = judge(settings)
    if settings.action == "mcp":  # which has ended, as its client has
        return
    if settings.json:
        print(json.dumps(result))
    for line in [] if settings.json else describe(result):
        print_text(printable(line))
    if settings.action == "submit" and (code := EXIT_CODES[result["verdict"]]):
        raise click.exceptions.Exit(code)
