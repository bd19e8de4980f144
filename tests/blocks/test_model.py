"""ModelConfig's refusals and the wiring of DecoderLM."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from blocks import registry
from blocks.families import InfeasibleArchitecture, Role
from blocks.model import DecoderLM, ModelConfig

Make = Callable[..., ModelConfig]
HYBRID = {
    "mixer.kind": "linear",
    "pattern.kind": "every_nth",
    "pattern.every_nth.every": 2,
    "pattern.every_nth.mixer.kind": "sliding_window",
    "pattern.every_nth.mixer.sliding_window.window": 8,
    "pattern.every_nth.mixer.sliding_window.kv_heads": 1,
    "premixer.kind": "short_conv",
    "layers": 4,
}
OTHER_LINEAR = {"pattern.kind": "every_nth", "pattern.every_nth.mixer.kind": "linear"}
TOKENS = torch.randint(48, (2, 21), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"position.kind": "learned"}, {"max_len": 80}, r"model\.position\.learned\.beyond"),
        ({}, {"max_len": 39}, r"model\.max_len must be at least model\.train_len; got 39 < 40"),
        ({}, {"d_ff": 0}, r"model\.d_ff must be at least 1; got 0"),
        (
            {"mixer.kind": "linear", "position.kind": "xpos"},
            {},
            r"model\.position\.kind='xpos' needs the hook 'scale', which model\.mixer\.kind='linear' does not offer; "
            r"mixers that do: .*sliding_window, softmax",
        ),
        (
            {**OTHER_LINEAR, "pattern.every_nth.every": 2, "position.kind": "alibi"},
            {},
            r"which model\.pattern\.every_nth\.mixer\.kind='linear' does not offer",
        ),
    ],
    ids=["learned", "short max_len", "no width", "scale", "pattern"],
)
def test_what_cannot_be_built_is_refused(
    small: Make, changes: dict[str, object], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(InfeasibleArchitecture, match=message):
        small(changes, **sizes)


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_odd_heads_cannot_be_rotated(small: Make, kind: str) -> None:
    plain = registry.encode(small({"position.kind": kind}))
    plain["mixer"]["softmax"]["head_dim"] = 7
    with pytest.raises(InfeasibleArchitecture, match=f"'{kind}'.*even head_dim.*7"):
        registry.decode(ModelConfig, plain)


def test_only_mixers_that_a_layer_uses_must_fit(small: Make) -> None:
    unused = {**OTHER_LINEAR, "pattern.every_nth.every": 8, "position.kind": "alibi"}
    assert small(unused).canonical().pattern.kind == "uniform"


def test_clamped_learned_positions_run_past_the_training_length(small: Make) -> None:
    config = small({"position.kind": "learned", "position.learned.beyond": "clamp"}, train_len=16, max_len=40)
    model = config.build(seed=0).eval()
    with torch.no_grad():
        assert model(TOKENS)[0].isfinite().all()


@pytest.mark.parametrize("position", ["none", "sinusoidal", "learned", "rotary"])
def test_a_hybrid_decodes_like_its_full_pass(small: Make, position: str) -> None:
    model = small({**HYBRID, "position.kind": position}).build(seed=0).eval()
    with torch.no_grad():
        whole, _ = model(TOKENS)
        state, parts = model.empty_state(2), []
        for start, end in ((0, 9), (9, 10), (10, 21)):
            part, state = model.step(TOKENS[:, start:end], state, start)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert all(tensor.shape[0] == 2 for tensor in state.values())


def test_decoding_leaves_the_given_state_as_it_was(small: Make) -> None:
    model = small(HYBRID).build(seed=0).eval()
    with torch.no_grad():
        _, state = model.step(TOKENS[:, :9], model.empty_state(2), 0)
        kept = copy.deepcopy(state)
        one, _ = model.step(TOKENS[:, 9:12], state, 9)
        again, _ = model.step(TOKENS[:, 9:12], state, 9)
    assert torch.equal(one, again)
    assert all(torch.equal(kept[name], tensor) for name, tensor in state.items())


def losses_and_gradients(model: DecoderLM, checkpointing: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(7)
    logits, auxiliary = model(TOKENS, checkpointing=checkpointing)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()) + auxiliary
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"residual_dropout": 0.3, "embedding_dropout": 0.2, "mixer.softmax.attention_dropout": 0.2},
        {"mixer.softmax.entropy_weight": 0.1},
        HYBRID,
    ],
    ids=["plain", "dropout", "entropy", "hybrid"],
)
def test_checkpointing_changes_neither_loss_nor_gradients(small: Make, changes: dict[str, object]) -> None:
    model = small(changes).build(seed=0).train()
    loss, gradients = losses_and_gradients(model, checkpointing=False)
    other_loss, other_gradients = losses_and_gradients(model, checkpointing=True)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, msg=name)


def test_checkpointing_keeps_less_for_the_backward_pass(small: Make) -> None:
    model = small({"layers": 8}).build(seed=0).train()
    kept = []
    for checkpointing in (False, True):
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(TOKENS, checkpointing=checkpointing)
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0] / 2


def test_auxiliary_losses_of_all_layers_are_added(small: Make) -> None:
    one, two = (
        small({"mixer.softmax.entropy_weight": 0.05, "layers": layers}).build(seed=0)(TOKENS)[1] for layers in (1, 2)
    )
    assert 0 < one < two < 0.1 * torch.log(torch.tensor(21.0))
    assert small().build(seed=0)(TOKENS)[1] == 0


def test_dropout_acts_in_training_only(small: Make) -> None:
    for path in ("residual_dropout", "embedding_dropout"):
        model = small({path: 0.5}).build(seed=0)
        plain = small().build(seed=0)
        assert torch.equal(model.eval()(TOKENS)[0], plain.eval()(TOKENS)[0])
        assert not torch.equal(model.train()(TOKENS)[0], plain(TOKENS)[0])


def test_a_tied_head_is_the_embedding(small: Make) -> None:
    tied, untied = small({"tied": True}).build(seed=0), small({"tied": False}).build(seed=0)
    extra = set(untied.roles) - set(tied.roles)
    assert {untied.roles[name] for name in extra} == {Role.HEAD}
    with torch.no_grad():
        before = tied(TOKENS)[0]
        tied.embedding[0] += 1
        assert not torch.equal(tied(TOKENS)[0][..., 0], before[..., 0])


def test_layers_of_one_head_shape_share_their_positions(small: Make) -> None:
    model = small({"position.kind": "t5_bias", "layers": 4}).build(seed=0)
    assert list(model.roles.values()).count(Role.BIAS_TABLE) == 1
    logits, _ = model(TOKENS)
    logits.square().mean().backward()
    (table,) = model.positions.parameters()
    assert table.grad is not None
    assert table.grad.abs().max() > 0


def test_meta_models_draw_nothing_and_hold_nothing(small: Make) -> None:
    before = torch.get_rng_state()
    model = small(HYBRID).build(seed=0, device="meta")
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_state_dicts_carry_a_model_over(small: Make) -> None:
    config = small(HYBRID)
    one, other = config.build(seed=0), config.build(seed=1)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(TOKENS)[0], other(TOKENS)[0])


def test_canonical_configs_are_their_own_canonical_form(small: Make) -> None:
    windowed = small({"mixer.kind": "sliding_window", "mixer.sliding_window.window": 64})
    canonical = windowed.canonical()
    assert canonical.mixer.kind == "softmax"
    assert canonical.canonical() == canonical
    torch.testing.assert_close(windowed.build(seed=0)(TOKENS)[0], canonical.build(seed=0)(TOKENS)[0])
