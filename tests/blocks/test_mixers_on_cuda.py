"""Mixers on a CUDA device: a training pass is captured whole, equals the CPU, and keeps its precision in bfloat16."""

import pytest
import torch
from small_mixers import KINDS, LENGTH, PAIRS, build, draw
from torch import Tensor

from blocks.families import AbstractMixer, Context, MixerModule, PositionModule


def trained_once(
    module: MixerModule, position: PositionModule, x: Tensor, live: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of its mean square for every parameter that takes part."""
    y = module(x, position, Context(live=live))
    parameters = [*module.parameters(), *(p for p in position.parameters() if p.dim() == 2 and p.shape[0] == 32)]
    return y, list(torch.autograd.grad(y.square().mean(), parameters))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("mixer", "kind"), [pair for pair in PAIRS if pair[1] not in ("learned", "sinusoidal")])
def test_a_training_pass_is_captured_as_a_cuda_graph_and_equals_the_cpu(
    mixer: AbstractMixer, kind: str, padded: bool
) -> None:
    module, position = build(mixer, kind)
    x = draw(2, LENGTH, 24)
    live = torch.ones(2, LENGTH, dtype=torch.bool)
    live[0, :3], live[1, 17:] = False, False
    y, gradients = trained_once(module, position, x, live if padded else None)
    module, position, x, live = module.cuda(), position.cuda(), x.cuda(), live.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        trained_once(module, position, x, live if padded else None)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_gradients = trained_once(module, position, x, live if padded else None)
    graph.replay()
    torch.cuda.synchronize()
    for ours, expected in zip([captured, *captured_gradients], [y, *gradients], strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_on_cuda_stays_close_to_float64(kind: str) -> None:
    for mixer in (mixer for mixer, other in PAIRS if other == kind):
        module, position = build(mixer, kind)
        x = draw(2, 48, 24)
        exact = module.double()(x.double(), position, Context())
        module, position = module.float().cuda(), position.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x.cuda(), position, Context())
        assert y.dtype == torch.bfloat16
        assert (y.double().cpu() - exact).norm() / exact.norm() < 0.03
