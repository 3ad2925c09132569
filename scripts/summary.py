"""Prints one summary line, in pytest's words, over several pytest runs.

    python scripts/summary.py REPORTS SECONDS STATUS CHECKS

`REPORTS` is the folder of their JUnit XML files, `SECONDS` the time of the whole run, and `STATUS`
its exit status: one that is not zero although every report is good (a lint failed, say) counts as
one error. `CHECKS` is the number of checks that passed, pytest runs or others; where no pytest run
was asked for it is what counts.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

KINDS = ("tests", "failures", "errors", "skipped")


def total(reports: Path) -> dict[str, int]:
    """Adds up the counts of every report in the folder."""
    counts = dict.fromkeys(KINDS, 0)
    for report in sorted(reports.glob("*.xml")):
        for suite in ET.parse(report).getroot().iter("testsuite"):  # noqa: S314 # our own file
            for kind in KINDS:
                counts[kind] += int(suite.get(kind, "0"))
    return counts


def summary(counts: dict[str, int], seconds: int, status: int, checks: int) -> str:
    """Words the counts as pytest does."""
    failed, errors, skipped = counts["failures"], counts["errors"], counts["skipped"]
    passed = counts["tests"] - failed - errors - skipped if counts["tests"] else checks
    if status != 0 and failed + errors == 0:
        errors = 1
    parts = [
        f"{count} {word}"
        for count, word in (
            (failed, "failed"),
            (passed, "passed"),
            (skipped, "skipped"),
            (errors, "error"),
        )
        if count
    ]
    return f" {', '.join(parts) or 'no tests ran'} in {seconds}s ".center(80, "=")


def main() -> int:
    """Runs the command line."""
    reports, seconds, status, checks = sys.argv[1:5]
    print(summary(total(Path(reports)), int(seconds), int(status), int(checks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
