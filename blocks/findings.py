"""What a diagnosis has to say to someone who does not read tables."""

from collections.abc import Iterator, Mapping

from blocks.diagnostics import COLLAPSED, FAST, GROWTH, IDLE, LARGE_LOGIT, SAME, SINK, SLOW, Diagnosis, Place


def warnings_of(diagnosis: Diagnosis) -> list[str]:
    """Sentences on what is unusual, layers counted from 1; none for a model in good health."""
    return [*_of_layers(diagnosis), *_of_depth(diagnosis), *_of_gradients(diagnosis.gradients)]


def warnings_of_updates(ratios: Mapping[Place, float]) -> list[str]:
    """Sentences on parameters that a step moved unusually far, or hardly at all."""
    found = []
    for (layer, role), ratio in ratios.items():
        if ratio > FAST:
            found.append(f"{layer}: one step moved the {role} weights by {ratio:.0%}; lower the learning rate")
        elif ratio < SLOW:
            found.append(f"{layer}: one step moved the {role} weights by {ratio:.1e} of their size, hardly at all")
    return found


def _of_layers(diagnosis: Diagnosis) -> Iterator[str]:
    for number, layer in enumerate(diagnosis.layers, start=1):
        heads = len(layer.entropy)
        sinks = sum(share > SINK for share in layer.sink_share)
        alike = sum(cosine > SAME for cosine in layer.redundancy)
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


def _of_depth(diagnosis: Diagnosis) -> Iterator[str]:
    first, last = diagnosis.embedding_rms, diagnosis.layers[-1].rms
    if first > 0 and last / first > GROWTH:
        yield (
            f"the residual stream grows {last / first:.0f}-fold over {len(diagnosis.layers)} layers, from {first:.2g} "
            f"to {last:.2g}"
        )
    if diagnosis.largest_logit > LARGE_LOGIT:
        yield f"logits reach {diagnosis.largest_logit:.0f}; cap them, or norm queries and keys"


def _of_gradients(gradients: Mapping[Place, float]) -> Iterator[str]:
    squares: dict[str, float] = {}
    for (layer, _), norm in gradients.items():
        if layer != "outside":
            squares[layer] = squares.get(layer, 0.0) + norm**2
    for (layer, role), norm in gradients.items():
        if norm == 0:
            yield f"{layer}: the {role} weights get no gradient"
    if len(squares) > 1:
        (low, small), (high, large) = (pick(squares.items(), key=lambda item: item[1]) for pick in (min, max))
        if small > 0 and (large / small) ** 0.5 > GROWTH:
            yield f"the gradient of {high} is {(large / small) ** 0.5:.0f} times that of {low}"
