"""Which raise statements of xpar no test has reached.

    make raises        # the whole suite under coverage, ranks included, then this script

It reads the data that `coverage` has left (`.coverage*`), so that it can be run again by itself:
`python -m tests.raise_coverage`.
"""

import ast
import sys
from pathlib import Path

from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parents[1]


def raises_in(path: Path) -> list[tuple[int, int, str]]:
    """First and last line, and text, of each raise statement of a file."""
    source = path.read_text()
    lines = source.splitlines()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    return [(node.lineno, node.end_lineno or node.lineno, lines[node.lineno - 1].strip()) for node in statements]


def executed(data: CoverageData, path: Path) -> set[int]:
    """Lines of a file that ran in any process."""
    return set(data.lines(str(path)) or ())


def main() -> int:
    """List what was not reached; 1 if there is any."""
    coverage = Coverage(data_file=str(ROOT / ".coverage"))
    coverage.combine([str(ROOT)], keep=True)
    data = coverage.get_data()
    total, missed = 0, []
    for path in sorted((ROOT / "xpar").rglob("*.py")):
        ran = executed(data, path)
        for first, last, text in raises_in(path):
            total += 1
            if not ran & set(range(first, last + 1)):
                missed.append(f"{path.relative_to(ROOT)}:{first}: {text}")
    sys.stdout.write("\n".join([*missed, f"{total - len(missed)} of {total} raise statements were reached"]) + "\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
