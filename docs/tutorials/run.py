"""Runs the code of tutorials: `python docs/tutorials/run.py [NAME...] [--out FOLDER]`.

The code blocks of a page run in order, as one program, in the folder that its pictures belong to: this one, or FOLDER.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def code_of(page: Path) -> str:
    """The Python blocks of a page, each line at its own number in the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (line == "```python") if fence else inside
    return "\n".join(lines)


def pictures_of(page: Path) -> list[str]:
    """Names of the pictures that a page shows."""
    return re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tutorials and write their pictures.")
    pages = {page.stem: page for page in sorted(HERE.glob("*.md"))}
    parser.add_argument("names", nargs="*", default=list(pages), metavar="NAME", help=f"out of: {', '.join(pages)}")
    parser.add_argument("--out", type=Path, default=HERE, help="where pictures go")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in pages]
    if unknown:
        parser.error(f"no tutorial {', '.join(unknown)}; there are {', '.join(pages)}")
    os.environ["MPLBACKEND"] = "Agg"
    os.chdir(options.out)
    for name in options.names:
        started = time.perf_counter()
        exec(compile(code_of(pages[name]), str(pages[name]), "exec"), {"__name__": name})
        print(f"{name}: {', '.join(pictures_of(pages[name]))} in {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
