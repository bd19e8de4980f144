"""The pointer-generator head: words are generated from the vocabulary or copied from the source."""

import math

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from blocks.cross_attention import cross_weights
from blocks.families import Role, linear
from blocks.ops.running_sum import running_sum

LEAST = 1e-12
"""Probabilities are kept from zero before their logarithm is taken."""


class PointerHead(nn.Module):
    """P(w) = p_gen P_vocab(w) + (1 - p_gen) sum of the attention on source tokens that are w (See et al. 2017, eq. 9).

    Attention is a single scaled dot product from the decoder's output to the memory; p_gen = sigmoid(w [context,
    output, input]) (eq. 8). Words outside the vocabulary have ids from vocab_size on, numbered by the caller per batch.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = linear(d_model, d_model, Role.QUERY)
        self.key = linear(d_model, d_model, Role.KEY)
        self.generate = linear(3 * d_model, 1, Role.FFN_GATE, bias=True)

    def forward(
        self,
        logits: Float[Tensor, "B T V"],
        output: Float[Tensor, "B T D"],
        embedded: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B M D"],
        live: Bool[Tensor, "B M"] | None,
        copied: Int[Tensor, "B M"],
        extra: int,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B T M"]]:
        """Log probabilities over the vocabulary and `extra` words behind it, and the attention on the source.

        `copied` are the source's ids there.
        """
        q, k = self.query(output)[:, :, None], self.key(memory)[:, :, None]
        attention = cross_weights(q, k, live, 1 / math.sqrt(q.shape[-1]))[:, 0]
        context = einsum(attention, memory.to(attention.dtype), "B T M, B M D -> B T D").to(output.dtype)
        p_gen = torch.sigmoid(self.generate(torch.cat([context, output, embedded], dim=-1)))
        return mixture(logits, p_gen, attention, copied, extra), attention


def mixture(
    logits: Float[Tensor, "B T V"],
    p_gen: Float[Tensor, "B T 1"],
    attention: Float[Tensor, "B T M"],
    copied: Int[Tensor, "B M"],
    extra: int,
) -> Float[Tensor, "B T W"]:
    """Log of the mixture of generating and copying; where nothing of the source is live, of generating alone."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    attention = attention.to(wide)
    generated = F.pad(torch.softmax(logits.to(wide), dim=-1), (0, extra))
    index = copied[:, None, :].expand(-1, logits.shape[1], -1)
    pointed = torch.zeros_like(generated).scatter_add(-1, index, attention)
    share = torch.where(attention.sum(-1, keepdim=True) > 0, p_gen.to(wide), 1.0)
    return torch.log((share * generated + (1 - share) * pointed).clamp_min(LEAST))


def coverage_loss(attention: Float[Tensor, "B T M"], live: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
    """How much of the source is attended to again, a mean over live target tokens (See et al. 2017, eqs. 10 and 12).

    The sum over the source of min(a, c), where c adds up the attention of the target tokens before.
    """
    if live is not None:
        attention = attention * live[:, :, None].to(attention.dtype)
    covered = running_sum(attention) - attention
    again = torch.minimum(attention, covered).sum(-1)
    return again.mean() if live is None else again.sum() / live.sum().clamp_min(1).to(again.dtype)
