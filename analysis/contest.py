"""Who meets in the finals of a search, which training comes next, and when a contest is over: pure functions.

A contest compares each of M finalists with one baseline at alpha / M, M and the finalists being fixed before the first
seed. Replica r of every contestant has the same seeds. Sweeps have seeds of their own and enter no verdict; the first
training of each, at the candidate's own rate, also decides which of the candidates become finalists.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from analysis.compare import Verdict, paired_verdict, standing
from search_space.contest import BASELINE, Bout, Contest, Ended, Judge, Ranked, Tuned
from search_space.records import Stage

MOST_FAILURES = 3
"""Replicas of a finalist, or of the baseline, that end badly, after which the finalist gets no more."""
Sweep = Mapping[int, float | None]
"""Losses by place, in order; None for a training that has not ended, NaN for one that ended badly."""
NONE_ENDED_WELL = "not tuned: no rate of its sweep ended well"
AT_END = "not tuned: its best learning rate is at the end of its sweep"


def candidates(ranked: Sequence[Ranked], most: int, baseline: str) -> list[int]:
    """The numbers of the best trials, at most so many; of those that differ in the learning rate alone the best one."""
    best: dict[str, Ranked] = {}
    for trial in sorted(ranked, key=lambda trial: (trial.loss, trial.number)):
        if trial.identity != baseline and math.isfinite(trial.loss):
            best.setdefault(trial.identity, trial)
    return [trial.number for trial in best.values()][:most]


def finalists(contest: Contest, ended: Ended) -> tuple[int, ...]:
    """The candidates that meet the baseline; empty while that is not known.

    Where there are more candidates than places, those enter whose loss is best on average over the search and one more
    training. Ranked by a single training each, luck fills the places, above all with candidates whose losses vary most.
    """
    if contest.places == len(contest.candidates):
        return tuple(contest.candidates)
    again = {candidate: _loss(ended, candidate, 0) for candidate in contest.candidates}
    if any(loss is None for loss in again.values()):
        return ()
    both = dict(zip(contest.candidates, contest.searched, strict=True))
    order = sorted(again, key=lambda candidate: (_sum(both[candidate], again[candidate]), candidate))
    return tuple(sorted(order[: contest.places]))


def _sum(*losses: float | None) -> float:
    """Infinite where one is missing or ended badly."""
    total = sum(math.inf if loss is None else loss for loss in losses)
    return math.inf if math.isnan(total) else total


def next_bout(contest: Contest, ended: Ended, running: Collection[Bout]) -> Bout | None:
    """The training to start beside those that run; None while there is none, and for good once nothing runs.

    Sweeps come first, and before them what decides on the finalists. Then replicas go to the finalists that are still
    undecided, to the one with the fewest first, and to the baseline as soon as one of them needs it.
    """
    known = {*ended, *running}
    entered = finalists(contest, ended)
    sweeps = {contestant: _sweep(contest, ended, contestant) for contestant in (BASELINE, *entered)}
    due = [(candidate, 0) for candidate in contest.candidates if contest.places < len(contest.candidates)]
    due += [(contestant, place) for contestant, losses in sweeps.items() for place in losses]
    for bout in (Bout(Stage.SWEEP, *each) for each in due):
        if bout not in known:
            return bout
    wanted = []
    for finalist in entered if _has_rate(sweeps[BASELINE]) else ():
        if _has_rate(sweeps[finalist]) and _goes_on(contest, ended, finalist):
            missing = next(_missing(contest, known, finalist), None)
            wanted += [(missing.place, finalist, missing)] if missing else []
    return min(wanted)[2] if wanted else None


def tuned(contest: Contest, ended: Ended, contestant: int) -> Tuned:
    """The best learning rate of a contestant by its sweep.

    A best rate at the end of the range extends the range once; one that lies at the new end is not known to be best.
    """
    return _tuned(_sweep(contest, ended, contestant))


def verdict_on(
    contest: Contest, ended: Ended, finalist: int, name: str = "finalist", *, unit: str = "nats/token"
) -> Verdict:
    """How a finalist, called by its name, stands against the baseline."""
    return paired_verdict(
        differences(ended, finalist, contest.spec.max_seeds),
        alpha=contest.share,
        margin=contest.spec.delta,
        contestant=name,
        baseline="baseline",
        unit=unit,
    )


def counted(ended: Ended, finalist: int, most: int) -> list[tuple[int, float, float]]:
    """(replica, loss of the baseline, loss of the finalist) of the pairs that count.

    They are those in which both ended well, up to the first in which one has not ended: a later pair that happens to be
    there already waits for the earlier ones, as what is left out must not depend on what it would show.
    """
    found = []
    for replica in range(most):
        baseline = ended.get(Bout(Stage.FINAL, BASELINE, replica))
        own = ended.get(Bout(Stage.FINAL, finalist, replica))
        if baseline is None or own is None:
            break
        if not (math.isnan(baseline) or math.isnan(own)):
            found.append((replica, baseline, own))
    return found


def differences(ended: Ended, finalist: int, most: int) -> list[float]:
    """Finalist minus baseline over the pairs that count, in the order of their replicas."""
    return [own - baseline for _, baseline, own in counted(ended, finalist, most)]


def _missing(contest: Contest, known: Collection[Bout], finalist: int) -> Iterator[Bout]:
    """The trainings that a finalist's pairs lack, the baseline's first."""
    for replica in range(contest.spec.max_seeds):
        for contestant in (BASELINE, finalist):
            bout = Bout(Stage.FINAL, contestant, replica)
            if bout not in known:
                yield bout


def _goes_on(contest: Contest, ended: Ended, finalist: int) -> bool:
    """Whether a finalist is to be trained on: nothing is decided about it."""
    for contestant in (BASELINE, finalist):
        trained = (ended.get(Bout(Stage.FINAL, contestant, place), 0.0) for place in range(contest.spec.max_seeds))
        if sum(map(math.isnan, trained)) >= MOST_FAILURES:
            return False
    values = differences(ended, finalist, contest.spec.max_seeds)
    return standing(values, alpha=contest.share, margin=contest.spec.delta)[0] == "undecided"


def _sweep(contest: Contest, ended: Ended, contestant: int) -> Sweep:
    """A contestant's sweep, its extension included once that is due; empty where there is none."""
    half = contest.spec.sweep // 2
    if not half:
        return {}
    lowest, highest = contest.reach[contestant]
    low, high = max(-half, lowest), min(half, highest)
    losses = {place: _loss(ended, contestant, place) for place in range(low, high + 1)}
    best = _best(losses) if all(loss is not None for loss in losses.values()) else None
    if best == low:
        low = max(low - half, lowest)
    elif best == high:
        high = min(high + half, highest)
    return {place: _loss(ended, contestant, place) for place in range(low, high + 1)}


def _best(losses: Sweep) -> int | None:
    """The place of the lowest loss, the middlemost of equal ones; None where none ended well."""
    sound = [(loss, abs(place), place) for place, loss in losses.items() if loss is not None and not math.isnan(loss)]
    return min(sound)[2] if sound else None


def _tuned(losses: Sweep) -> Tuned:
    if not losses:
        return Tuned(is_over=True, place=0, doubt="")
    is_over = all(loss is not None for loss in losses.values())
    best = _best(losses)
    if best is None:
        return Tuned(is_over=is_over, place=0, doubt=NONE_ENDED_WELL if is_over else "")
    at_end = is_over and best in (min(losses), max(losses))
    return Tuned(is_over=is_over, place=best, doubt=AT_END if at_end else "")


def _has_rate(losses: Sweep) -> bool:
    """Whether a contestant's sweep is over, and any rate of it ended well."""
    rate = _tuned(losses)
    return rate.is_over and rate.doubt != NONE_ENDED_WELL


def _loss(ended: Ended, contestant: int, place: int) -> float | None:
    return ended.get(Bout(Stage.SWEEP, contestant, place))


JUDGE = Judge(candidates=candidates, finalists=finalists, next_bout=next_bout, tuned=tuned)
"""The judge of `assay finals`, and of the simulations in benchmarks/verdicts.py."""
