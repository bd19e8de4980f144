"""`assay rm` and `assay gc`: delete a search, or what nothing refers to, after asking."""

import argparse
import sys

from runners.housekeeping import carry_out, plan_collect, plan_remove
from search_space.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    """Show the plan, ask, carry it out."""
    if arguments.command == "rm":
        plan = plan_remove(arguments.name, arguments.tracking_uri)
    else:
        plan = plan_collect(arguments.tracking_uri)
    if not plan:
        print("nothing to delete")
        return 0
    print("\n".join(plan.lines))
    print(f"files: {plan.size_bytes / 2**20:,.1f} MiB")
    if not arguments.yes and not _agreed(arguments.command):
        print("nothing was deleted")
        return 1
    carry_out(plan, arguments.tracking_uri)
    print("deleted")
    return 0


def _agreed(command: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"assay {command}: asks before it deletes, and there is no terminal to ask on; add --yes")
    return input("Delete these? [y/N] ").strip().lower() in ("y", "yes")
