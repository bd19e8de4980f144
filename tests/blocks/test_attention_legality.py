"""Which attention mixers go with what: legal pairs train a step, look back only and decode; others are refused."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from blocks.families import InfeasibleArchitecture
from blocks.model import ModelConfig

pytestmark = pytest.mark.slow

Make = Callable[..., ModelConfig]
TOKENS = torch.randint(48, (2, 23), generator=torch.Generator().manual_seed(0))

LEGAL: tuple[dict[str, object], ...] = (
    {"mixer.kind": "mla", "position.kind": "alibi"},
    {"mixer.kind": "mla", "position.kind": "rotary"},
    {"mixer.kind": "longformer", "position.kind": "rotary"},
    {"mixer.kind": "bigbird", "mixer.bigbird.block": 4, "position.kind": "alibi"},
    {"mixer.kind": "multiscale_pool", "position.kind": "rotary"},
    {"mixer.kind": "forgetting", "position.kind": "rotary"},
    {"mixer.kind": "forgetting", "position.kind": "none"},
    {"mixer.softmax.qk_norm": "rms", "mixer.softmax.softcap": 20.0},
    {"mixer.kind": "sliding_window", "mixer.sliding_window.window": 8, "mixer.sliding_window.sink": "learned"},
    {
        "mixer.kind": "sliding_window",
        "mixer.sliding_window.window": 8,
        "mixer.sliding_window.sink": "zero",
        "position.kind": "alibi",
    },
    {"mixer.softmax.memory": 4, "mixer.softmax.gate": "channel", "position.kind": "t5_bias"},
    {"premixer.kind": "token_shift", "mixer.kind": "moba"},
)


@pytest.mark.parametrize("changes", LEGAL)
def test_a_legal_combination_trains_looks_back_only_and_decodes(small: Make, changes: dict[str, object]) -> None:
    model = small(changes).build(seed=1)
    logits, auxiliary = model(TOKENS)
    (F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()) + auxiliary).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    model.eval()
    other = TOKENS.clone()
    other[:, 14] = (other[:, 14] + 1) % 48
    live = torch.arange(27) < 23
    padded = torch.cat([TOKENS, TOKENS[:, :4]], dim=1)
    with torch.no_grad():
        whole = model(TOKENS)[0]
        torch.testing.assert_close(model(other)[0][:, :14], whole[:, :14], rtol=0, atol=1e-6)
        torch.testing.assert_close(model(padded, live.expand(2, -1))[0][:, :23], whole, rtol=1e-5, atol=1e-5)
        first, state = model.step(TOKENS[:, :9], model.empty_state(2), 0)
        second, _ = model.step(TOKENS[:, 9:], state, 9)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer.kind": "linformer", "position.kind": "sinusoidal"}, r"mixer\.kind='linformer' cannot serve"),
        ({"mixer.kind": "nystrom", "position.kind": "sinusoidal"}, r"mixer\.kind='nystrom' cannot serve"),
        ({"mixer.kind": "forgetting", "position.kind": "alibi"}, r"'alibi' needs the hook 'score_bias'.*'forgetting'"),
        ({"mixer.kind": "forgetting", "position.kind": "t5_bias"}, r"'t5_bias' needs the hook 'score_bias'"),
        ({"mixer.kind": "forgetting", "stack.kind": "encoder"}, r"mixer\.kind='forgetting' cannot serve"),
        ({"mixer.kind": "mla", "position.kind": "shaw"}, r"'shaw' needs the hook 'content_bias'.*'mla'"),
        ({"mixer.kind": "block_local", "position.kind": "fire"}, r"'fire' needs the hook.*'block_local'"),
        ({"mixer.kind": "multiscale_pool", "stack.kind": "encoder"}, r"mixer\.kind='multiscale_pool' cannot serve"),
    ],
)
def test_an_illegal_combination_is_refused_with_what_would_do(
    small: Make, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message) as refused:
        small(changes)
    assert "could be" in str(refused.value) or "mixers that do: " in str(refused.value)
