"""The command `assay`: arguments here, one module per command under runners/commands, each imported when it runs."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

from search_space.errors import UserError, WorkError

GOOD, FAILED, BAD_INPUT = 0, 1, 2

_STORES = frozenset({"sqlite3", "sqlalchemy", "optuna", "mlflow", "psycopg2"})
_RUN = "a run: NAME/NUMBER, NAME/best, a run id or its unique beginning"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{self.prog}: {message}; '{self.prog} --help' lists what it takes")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="assay", description="Search transformer architectures; know which choice wins, and how sure."
    )
    parser.add_argument("--version", action="version", version=f"assay {version('assay-search')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, help: str, module: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(module=module or name)
        sub.add_argument("--tracking-uri", default="", help="tracking store; default MLFLOW_TRACKING_URI, else mlruns/")
        return sub

    blocks = command("blocks", "every registered variant: meaning, paper, fields and domains, hooks")
    blocks.add_argument("--family", default="", help="one family only, such as mixer or position")
    blocks.add_argument("--html", default="", metavar="FILE", help="write one HTML page instead")
    blocks.add_argument("--markdown", default="", metavar="FILE", help="write Markdown tables instead")
    blocks.add_argument(
        "--measure", default="", metavar="FOLDER", help="time mixers against length; write page, picture"
    )
    blocks.add_argument("--mixers", default="", metavar="KIND,KIND", help="with --measure: these only")
    blocks.add_argument("--lengths", default="", metavar="N,N", help="with --measure: tokens (default 256 to 4096)")
    blocks.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --measure: where (default cpu)")
    _json(blocks)

    check = command("check", "validate an experiment; train nothing")
    check.add_argument("file", help="experiment file or the name of a preset")
    check.add_argument("--samples", type=_positive, default=200, help="points drawn to estimate shares (default 200)")
    _overrides(check)
    _json(check)

    search = command("search", "run a search; the same command again goes on where it stopped")
    search.add_argument("file", help="experiment file or the name of a preset")
    search.add_argument("--trials", type=_positive, default=0, help="how many trials in total")
    search.add_argument("--jobs", type=_positive, default=0, help="trials at a time")
    search.add_argument("--engine", choices=("local", "ray"), default="", help="what runs trials; default: the file's")
    search.add_argument("--address", default="", help="a Ray cluster: HOST:6379, or auto on one of its machines")
    search.add_argument("--seed", type=_natural, default=None, help="seed of the suggestions and of every trial")
    search.add_argument("--name", default="", help="name of the search; default: the name in the file")
    search.add_argument("--study", default="", help="study storage: sqlite:///FILE or postgresql://...")
    search.add_argument("--data", default="", help="folder or file to read the task's data from")
    search.add_argument(
        "--extend", action="store_true", help="go on under an edited file; old trials inform the sampler"
    )
    search.add_argument(
        "--join", action="store_true", help="work beside the driver that runs this search, with workers of one's own"
    )
    search.add_argument(
        "--retries",
        type=_natural,
        default=None,
        help="how often a trial that failed is run again (default: the file's)",
    )
    search.add_argument(
        "--warm-start",
        action="append",
        default=[],
        metavar="NAME",
        help="an earlier search whose trials inform the sampler; may be repeated",
    )
    search.add_argument("--no-report", action="store_true", help="leave the report out at the end")
    _overrides(search)

    finals = command("finals", "train the best candidates again against a baseline, with paired seeds, until decided")
    finals.add_argument("name", help="name of a search")
    finals.add_argument("--baseline", default="", help=f"whom to beat: an experiment file, or {_RUN}")
    finals.add_argument("--top", type=_positive, default=0, help="how many of the best candidates, 1 to 5 (default 5)")
    finals.add_argument("--delta", type=float, default=None, help="gap below which two are equal, in nats per token")
    finals.add_argument("--max-seeds", type=_positive, default=0, help="seeds of each, at most (default 10)")
    finals.add_argument("--sweep", type=_natural, default=None, help="learning rates tried for each before (default 5)")
    finals.add_argument("--alpha", type=float, default=None, help="chance that a verdict is ever wrong (default 0.05)")
    finals.add_argument("--at-length", type=_natural, default=None, help="compare the losses at this eval length")
    finals.add_argument("--jobs", type=_positive, default=0, help="trainings at a time")
    finals.add_argument("--address", default="", help="a Ray cluster: HOST:6379, or auto on one of its machines")
    finals.add_argument("--study", default="", help="study storage; default: the one the search was begun with")
    finals.add_argument("--data", default="", help="folder or file to read the task's data from")

    runs = command("runs", "searches, or the runs of one search: state, class of failure, cost, result")
    runs.add_argument("name", nargs="?", default="", help="name of a search")
    _json(runs)

    show = command("show", "one run: state, reason and last lines, cost, result, parameters", "runs")
    show.add_argument("run", help=_RUN)
    _json(show)

    retry = command("retry", "run trials again that did not end well; the reason of each earlier attempt is kept")
    retry.add_argument(
        "run", help="NAME/NUMBER, NAME/final/NUMBER, a run id or its beginning; NAME alone with --failed"
    )
    retry.add_argument("--failed", action="store_true", help="all failed trials of the search NAME")
    retry.add_argument("--jobs", type=_positive, default=0, help="trials at a time")
    retry.add_argument("--address", default="", help="a Ray cluster: HOST:6379, or auto on one of its machines")
    retry.add_argument("--study", default="", help="study storage; default: the one the search was begun with")
    retry.add_argument("--data", default="", help="folder or file to read the task's data from")

    train = command("train", "train the candidate of a run longer, on one or several devices")
    train.add_argument("run", help=_RUN)
    train.add_argument("--tokens", type=_count, required=True, help="training tokens, such as 1B; schedules stretch")
    train.add_argument("--devices", type=_positive, default=1, help="processes, a device each (default 1)")
    train.add_argument(
        "--strategy",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="ddp: each device holds the whole model; fsdp: they share it out (default ddp)",
    )
    train.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: what the run was trained on")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint, on any number of devices")
    train.add_argument(
        "--checkpoint-tokens", type=_count, default=0, help="tokens between two checkpoints (default: 1 %% of all)"
    )
    train.add_argument("--name", default="", help="name of the new run; another name trains anew")
    train.add_argument("--data", default="", help="folder or file to read the task's data from")

    ladder = command("ladder", "candidates at growing sizes, and which wins at a size that is not trained")
    ladder.add_argument("runs", nargs="+", metavar="RUN", help=_RUN)
    ladder.add_argument("--sizes", required=True, help="parameters, such as 1M,3M,10M,30M; at least three")
    ladder.add_argument("--target", type=_count, required=True, help="parameters of the size to judge, such as 1B")
    ladder.add_argument("--seeds", type=_positive, default=3, help="paired seeds at each size (default 3)")
    ladder.add_argument("--tokens-per-param", type=float, default=20.0, help="training tokens a parameter (default 20)")
    ladder.add_argument("--batch-tokens", type=_count, default=0, help="tokens of a batch; default: the first run's")
    ladder.add_argument(
        "--sweep", type=int, choices=(0, 3, 5), default=3, help="learning rates tried at the smallest size (default 3)"
    )
    ladder.add_argument(
        "--depth",
        choices=("given", "scaled"),
        default="given",
        help="layers: as in the run, or growing with the cube root of the size (default given)",
    )
    ladder.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    ladder.add_argument("--sure", type=float, default=0.9, help="least probability of a verdict (default 0.9)")
    ladder.add_argument("--name", default="", help="name of the ladder; default: the first run's search and -ladder")
    ladder.add_argument("--jobs", type=_positive, default=0, help="trainings at a time")
    ladder.add_argument("--address", default="", help="a Ray cluster: HOST:6379, or auto on one of its machines")
    ladder.add_argument("--study", default="", help="study storage: sqlite:///FILE or postgresql://...")
    ladder.add_argument("--data", default="", help="folder or file to read the task's data from")

    replay = command("replay", "rebuild a run from the tracking store, train it again, compare bit for bit")
    replay.add_argument("run", help=_RUN)
    replay.add_argument("--data", default="", help="where the data lies when the store does not hold it")
    _recorded_blocks(replay)
    _json(replay)

    report = command("report", "Markdown and pictures: what won, by how much, and what is undecided")
    report.add_argument("name", help="name of a search")
    report.add_argument("--out", default="", help="folder to write to; default reports/NAME")

    best = command("best", "the winner of a search", "best")
    best.add_argument("name", help="name of a search")
    best.add_argument("--by", default="loss", help="metric to minimise (default loss); -METRIC maximises")
    best.add_argument("--max-params", type=_count, default=0, help="only models with at most so many parameters")
    best.add_argument("--as-file", action="store_true", help="print an experiment file that holds just this candidate")
    _json(best)

    compare = command("compare", "two runs side by side: what differs and what it did", "best")
    compare.add_argument("run", help=_RUN)
    compare.add_argument("other", help=_RUN)
    _json(compare)

    export = command("export", "the model as safetensors, its config and a ten-line loader")
    export.add_argument("run", help=_RUN)
    export.add_argument("--to", required=True, help="folder to create")
    export.add_argument("--data", default="", help="where the data lies when the model must be trained again")
    _recorded_blocks(export)

    audit = command("audit", "prove that each trial followed from what had been told when it was proposed")
    audit.add_argument("name", help="name of the search")
    audit.add_argument("--study", default="", help="study storage: sqlite:///FILE or postgresql://...")
    _json(audit)

    sync = command("sync", "show in a tracking store what a study holds: a new server, a search copied from elsewhere")
    sync.add_argument("name", help="name of the search")
    sync.add_argument("--from", dest="source", default="mlruns", help="copy of an mlruns folder (default mlruns)")
    sync.add_argument("--study", default="", help="study storage: sqlite:///FILE or postgresql://...")

    remove = command("rm", "delete a search: its runs, files and study", "housekeeping")
    remove.add_argument("name", help="name of a search")
    remove.add_argument("--yes", action="store_true", help="do not ask")

    collect = command("gc", "delete what nothing refers to", "housekeeping")
    collect.add_argument("--yes", action="store_true", help="do not ask")

    dashboard = command("dashboard", "start the MLflow dashboard on this machine")
    dashboard.add_argument("--port", type=_port, default=5000, help="port on 127.0.0.1 (default 5000)")
    return parser


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="stable JSON (docs/json.md) instead of text")


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="override one entry of the file, such as budget.tokens=1M; may be repeated",
    )


def _recorded_blocks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recorded-blocks", action="store_true", help="run your own block modules as the store holds them"
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a whole number from 0; got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    value = _natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("takes a whole number from 1; got 0")
    return value


def _port(text: str) -> int:
    value = _natural(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"takes a port from 1 to 65535; got {value}")
    return value


def _count(text: str) -> int:
    from search_space.values import count

    try:
        return int(count()(int(text) if text.isdecimal() else text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def console() -> int:
    """The program: `main` on the command line, ended quietly by a closed pipe and cleanly by SIGTERM."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 for good, 1 when the work failed, 2 for bad input."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    sys.path.append(os.getcwd())
    try:
        arguments = _parser().parse_args(argv)
        return int(importlib.import_module(f"runners.commands.{arguments.module}").run(arguments))
    except UserError as error:
        print(f"assay: {error}", file=sys.stderr)
        return BAD_INPUT
    except WorkError as error:
        print(f"assay: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"assay: {error}; free space or correct the rights, then type the same command again", file=sys.stderr)
        return FAILED
    except Exception as error:
        # Databases raise through several libraries; what they say goes to the user, anything else is our fault.
        if type(error).__module__.partition(".")[0] not in _STORES:
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"assay: a database failed: {said}; mend it, then type the same command again", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("assay: interrupted", file=sys.stderr)
        return FAILED
