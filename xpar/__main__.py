"""`python -m xpar doctor`: what works on this machine, what is missing, and what to do about it."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all that is needed works, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m xpar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="examine this machine, with a test on two processes")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    doctor.add_argument("--limit", type=float, default=300.0, help="seconds that the test may take (default: 300)")
    arguments = parser.parse_args(argv)

    from xpar.doctor import examine

    report = examine(limit=arguments.limit)
    sys.stdout.write(report.to_json() if arguments.json else report.to_text())
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
