"""`assay blocks`: what the registry holds."""

import argparse
import json
import sys
from pathlib import Path

from blocks import registry
from blocks.families import AbstractMixer
from runners import blocktable
from runners.blocktable import FAMILIES
from search_space.errors import UserError
from search_space.space import unknown

SHORTEST = 64
"""Tokens; some mixers' defaults need as many."""


def run(arguments: argparse.Namespace) -> int:
    """Print every variant, as text or JSON, or write it to a file as Markdown or HTML."""
    if arguments.family and arguments.family not in FAMILIES:
        raise UserError(f"assay blocks --family {arguments.family}: {unknown('family', arguments.family, FAMILIES)}")
    if arguments.measure:
        return _measure(arguments)
    for option in ("mixers", "lengths"):
        if getattr(arguments, option):
            raise UserError(f"assay blocks --{option}: says what --measure FOLDER measures; add it")
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


def _measure(arguments: argparse.Namespace) -> int:
    import torch

    from runners import complexity, complexity_page

    folder = Path(arguments.measure)
    if not folder.is_dir():
        raise UserError(f"assay blocks --measure {folder}: is no folder; name one that exists")
    known = registry.variants(AbstractMixer)
    kinds = arguments.mixers.split(",") if arguments.mixers else sorted(known)
    for kind in kinds:
        if kind not in known:
            raise UserError(f"assay blocks --mixers {kind}: {unknown('mixer', kind, known)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("assay blocks --device cuda: torch finds no CUDA device here; leave --device out for the CPU")
    torch.set_num_threads(1)
    found: list[complexity.Growth] = []
    for growth in complexity.measure(kinds, _lengths(arguments.lengths), arguments.device):
        last = growth.points[-1]
        progress = (
            f"{growth.kind}: {1000 * last.seconds:.3g} ms at {last.length} tokens, {len(found) + 1} of {len(kinds)}"
        )
        print(progress, file=sys.stderr, flush=True)
        found.append(growth)
    for path in complexity_page.write(found, folder, arguments.device):
        print(path)
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    """The lengths to measure at, shortest first."""
    from runners.complexity import LENGTHS

    if not text:
        return LENGTHS
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) >= SHORTEST for part in parts) or len(set(map(int, parts))) < 2:
        raise UserError(
            f"assay blocks --lengths {text}: takes two or more different numbers of tokens, each at least {SHORTEST}, "
            f"separated by commas, such as 512,1024,2048"
        )
    return tuple(sorted({int(part) for part in parts}))


def _write(option: str, path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"assay blocks {option} {path}: cannot be written ({reason}); name a file in a folder that exists"
        ) from error
    print(path)
