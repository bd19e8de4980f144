"""Looped layers: a few blocks of parameters used again and again."""

from dataclasses import dataclass, replace
from typing import ClassVar

from blocks import registry
from blocks.families import (
    AbstractMixer,
    AbstractPlacement,
    AbstractResidual,
    Dims,
    InfeasibleArchitecture,
    ResidualModule,
)
from blocks.model import ModelConfig
from blocks.registry import register
from blocks.residual import Plain, PlainResidual
from search_space.domains import choice


@register
@dataclass(frozen=True, kw_only=True)
class Looped(AbstractResidual):
    """A few blocks are used again and again: depth without further parameters."""

    kind: ClassVar[str] = "looped"
    paper: ClassVar[str] = (
        "Universal Transformers, Dehghani et al. 2018, arXiv:1807.03819; ALBERT, Lan et al. 2019, section 3.1, "
        "arXiv:1909.11942"
    )
    proof: ClassVar[str] = "test_a_looped_model_is_its_unrolled_copy"
    reference: ClassVar[str] = "its unrolled copy"

    blocks: int = choice(1, 2, 3, 4, default=1, help="blocks with parameters of their own")
    order: str = choice("cycle", "repeat", default="cycle", help="blocks in turn, or each several times in a row")

    def build(self, dims: Dims) -> ResidualModule:
        return PlainResidual()

    def block_of(self, layer: int, layers: int) -> int:
        blocks = min(self.blocks, layers)
        return layer % blocks if self.order == "cycle" else layer * blocks // layers

    def canonical(self, config: ModelConfig) -> AbstractResidual:
        if self.blocks >= config.layers:
            return Plain()
        cycle = replace(self, order="cycle")
        return cycle if self._order(config) == cycle._order(config) else self

    def check(self, config: ModelConfig) -> None:
        """Layers that share a block have to want the same of it."""
        shares = f"model.residual.kind='looped' with {self.blocks} blocks in the order {self.order!r} uses one block"
        mixers: dict[int, AbstractMixer] = {}
        for block, mixer in zip(self._order(config), config.layer_mixers(), strict=True):
            if mixers.setdefault(block, mixer) != mixer:
                raise InfeasibleArchitecture(
                    f"{shares} in layers for which model.pattern.kind={config.pattern.kind!r} wants the mixers "
                    f"{mixers[block].kind!r} and {mixer.kind!r}; set model.pattern to 'uniform', or "
                    f"model.residual.looped.blocks to the period of the pattern with the order 'cycle'"
                )
        if not self._fits(config.placement, config):
            placements = registry.variants(AbstractPlacement).items()
            able = [kind for kind, other in placements if self._fits(other(), config)]
            raise InfeasibleArchitecture(
                f"{shares} in layers that model.placement.kind={config.placement.kind!r} builds differently; "
                f"placements that would do: {', '.join(able)}"
            )

    def _fits(self, placement: AbstractPlacement, config: ModelConfig) -> bool:
        """Whether the placement builds all layers of each block alike."""
        dims, forms = config.dims(), dict[int, object]()
        return all(
            forms.setdefault(block, form) == form
            for layer, block in enumerate(self._order(config))
            for form in [placement.layer_form(dims, layer)]
        )

    def _order(self, config: ModelConfig) -> list[int]:
        return [self.block_of(layer, config.layers) for layer in range(config.layers)]
