"""`assay blocks`: what the registry holds."""

import argparse
import json
from pathlib import Path

from runners import blocktable
from runners.blocktable import FAMILIES
from search_space.errors import UserError
from search_space.space import unknown


def run(arguments: argparse.Namespace) -> int:
    """Print every variant, as text or JSON, or write it to a file as Markdown or HTML."""
    if arguments.family and arguments.family not in FAMILIES:
        raise UserError(f"assay blocks --family {arguments.family}: {unknown('family', arguments.family, FAMILIES)}")
    table = blocktable.table([arguments.family] if arguments.family else tuple(FAMILIES))
    for option, path, render in (
        ("--html", arguments.html, blocktable.page),
        ("--markdown", arguments.markdown, blocktable.markdown),
    ):
        if path:
            _write(option, Path(path), render(table))
    if arguments.json:
        print(json.dumps(table, indent=2))
    elif not arguments.html and not arguments.markdown:
        print(blocktable.text(table))
    return 0


def _write(option: str, path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"assay blocks {option} {path}: cannot be written ({reason}); name a file in a folder that exists"
        ) from error
    print(path)
