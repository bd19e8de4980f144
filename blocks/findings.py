"""What a diagnosis has to say to someone who does not read tables."""

from collections.abc import Iterator, Mapping, Sequence

from blocks.diagnostics import (
    COLLAPSED,
    FAST,
    GROWTH,
    HARD,
    IDLE,
    LARGE_LOGIT,
    ORDERLESS,
    SAME,
    SINK,
    SLOW,
    Diagnosis,
    LayerDiagnosis,
    Place,
)
from blocks.families import MATRICES


def warnings_of(diagnosis: Diagnosis) -> list[str]:
    """Sentences on what is unusual, layers counted from 1; none for a model in good health."""
    return [*_of_layers(diagnosis), *_of_depth(diagnosis), *_of_gradients(diagnosis.gradients)]


def warnings_of_updates(ratios: Mapping[Place, float]) -> list[str]:
    """Sentences on matrices that a step moved unusually far, or hardly at all, one for each kind.

    Gains, biases and scalars may start at zero, and then any step is large beside them.
    """
    drawn = {place: ratio for place, ratio in ratios.items() if place[1] in MATRICES}
    fast = {place: ratio for place, ratio in drawn.items() if ratio > FAST}
    slow = {place: ratio for place, ratio in drawn.items() if ratio < SLOW}
    found = []
    if fast:
        (layer, role), ratio = max(fast.items(), key=lambda item: item[1])
        more = f" ({len(fast) - 1} more too far)" if len(fast) > 1 else ""
        found.append(f"{layer}: one step moved the {role} weights by {ratio:.0%}{more}; lower the learning rate")
    if slow:
        (layer, role), ratio = min(slow.items(), key=lambda item: item[1])
        more = f" ({len(slow) - 1} more as little)" if len(slow) > 1 else ""
        found.append(f"{layer}: one step moved the {role} weights by {ratio:.1e} of their size{more}, hardly at all")
    return found


def warnings_of_growth(before: Diagnosis, after: Diagnosis) -> list[str]:
    """Sentences on what training made unusually much larger between two diagnoses of one model on one batch."""
    if before.logit_rms <= 0 or after.logit_rms / before.logit_rms <= GROWTH:
        return []
    return [
        f"logits grew {after.logit_rms / before.logit_rms:.0f}-fold in training, from {before.logit_rms:.2g} to "
        f"{after.logit_rms:.2g}; lower the learning rate, or cap them"
    ]


def unread(diagnosis: Diagnosis, kinds: Sequence[str]) -> list[str]:
    """Sentences on the layers, of mixers of these kinds, of which no attention weights could be read."""
    layers: dict[str, list[str]] = {}
    for number, (layer, kind) in enumerate(zip(diagnosis.layers, kinds, strict=True), start=1):
        if not layer.entropy:
            layers.setdefault(kind, []).append(str(number))
    return [
        f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: no attention weights can be read off {kind}"
        for kind, numbers in layers.items()
    ]


def _of_layers(diagnosis: Diagnosis) -> Iterator[str]:
    for number, layer in enumerate(diagnosis.layers, start=1):
        heads = len(layer.entropy)
        sinks = sum(share > SINK for share in layer.sink_share)
        alike = sum(cosine > SAME for cosine in layer.redundancy)
        hard = _hard(layer)
        if hard:
            yield f"layer {number}: {hard} of {heads} heads look at a single token each"
        if sinks:
            yield f"layer {number}: {sinks} of {heads} heads attend only to token 1"
        if alike > sinks and alike > 1:
            yield f"layer {number}: {alike} of {heads} heads have the map of another head"
        if layer.rank < COLLAPSED * diagnosis.d_model:
            yield (
                f"layer {number}: representations use {layer.rank:.1f} of {diagnosis.d_model} dimensions; tokens look "
                f"nearly alike"
            )
        if layer.dead_units > IDLE:
            yield f"layer {number}: {layer.dead_units:.0%} of the FFN's units never fire"


def _hard(layer: LayerDiagnosis) -> int:
    """Heads that look at one token, which is not the first."""
    rows = zip(layer.entropy, layer.sink_share, strict=True)
    return sum(entropy < HARD and share <= SINK for entropy, share in rows)


def _of_depth(diagnosis: Diagnosis) -> Iterator[str]:
    # A first layer lifts small embeddings to its own scale in sound models too.
    first, last = max(diagnosis.embedding_rms, diagnosis.layers[0].rms), diagnosis.layers[-1].rms
    if first > 0 and last / first > GROWTH:
        yield (
            f"the residual stream grows {last / first:.0f}-fold over {len(diagnosis.layers)} layers, from {first:.2g} "
            f"to {last:.2g}"
        )
    if diagnosis.order_effect < ORDERLESS:
        yield "the order of earlier tokens does not reach the prediction: mixers see no places, or add hardly anything"
    if diagnosis.largest_logit > LARGE_LOGIT:
        yield f"logits reach {diagnosis.largest_logit:.0f}; cap them, or norm queries and keys"


def _of_gradients(gradients: Mapping[Place, float]) -> Iterator[str]:
    squares: dict[str, float] = {}
    for (layer, _), norm in gradients.items():
        if layer != "outside":
            squares[layer] = squares.get(layer, 0.0) + norm**2
    still = [place for place, norm in gradients.items() if norm == 0]
    if still:
        layer, role = still[0]
        more = f" ({len(still) - 1} more likewise)" if len(still) > 1 else ""
        yield f"{layer}: the {role} weights get no gradient{more}"
    if len(squares) > 1:
        (low, small), (high, large) = (pick(squares.items(), key=lambda item: item[1]) for pick in (min, max))
        if small > 0 and (large / small) ** 0.5 > GROWTH:
            yield f"the gradient of {high} is {(large / small) ** 0.5:.0f} times that of {low}"
