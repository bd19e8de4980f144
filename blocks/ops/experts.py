"""Gated experts over routed tokens: every expert on every token (the reference), and tokens grouped by expert.

Both have shapes that depend on no value, so that they can be captured, and drop nothing.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def dense_experts(
    x: Float[Tensor, "N D"],
    experts: Int[Tensor, "N A"],
    gates: Float[Tensor, "N A"],
    w_gate: Float[Tensor, "E F D"],
    w_in: Float[Tensor, "E F D"],
    w_out: Float[Tensor, "E D F"],
) -> Float[Tensor, "N D"]:
    """The sum over each token's A experts of gate x W2 (silu(W1 x) * V x), every expert run on every token."""
    inner = F.silu(torch.einsum("nd,efd->nef", x, w_gate)) * torch.einsum("nd,efd->nef", x, w_in)
    outputs = torch.einsum("nef,edf->ned", inner, w_out)
    weights = torch.zeros_like(outputs[..., 0]).scatter_add(1, experts, gates.to(outputs.dtype))
    return torch.einsum("ne,ned->nd", weights, outputs)


def grouped_experts(
    x: Float[Tensor, "N D"],
    experts: Int[Tensor, "N A"],
    gates: Float[Tensor, "N A"],
    w_gate: Float[Tensor, "E F D"],
    w_in: Float[Tensor, "E F D"],
    w_out: Float[Tensor, "E D F"],
) -> Float[Tensor, "N D"]:
    """The same sum at about A / E of the work.

    Assignments are sorted by expert into blocks of the mean load; each block belongs to one expert, and there are
    always as many blocks as the worst distribution of tokens needs: at most twice the useful work.
    """
    n_experts, n_assigned = w_gate.shape[0], experts.numel()
    rows = -(-n_assigned // n_experts)
    n_blocks = n_assigned // rows + n_experts
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    load = torch.zeros(n_experts, dtype=torch.int64, device=x.device).scatter_add(0, flat, torch.ones_like(flat))
    blocks_end = ((load + rows - 1) // rows).cumsum(0)
    first_row = (blocks_end - (load + rows - 1) // rows) * rows
    first_assigned = load.cumsum(0) - load
    by_expert = flat[order]
    slot = first_row[by_expert] + torch.arange(n_assigned, device=x.device) - first_assigned[by_expert]
    owner = (torch.arange(n_blocks, device=x.device)[:, None] >= blocks_end).sum(1).clamp(max=n_experts - 1)
    token = order // experts.shape[1]
    blocks = x.new_zeros(n_blocks * rows, x.shape[1]).index_copy(0, slot, x[token]).unflatten(0, (n_blocks, rows))
    inner = F.silu(torch.einsum("brd,bfd->brf", blocks, w_gate[owner]))
    inner = inner * torch.einsum("brd,bfd->brf", blocks, w_in[owner])
    outputs = torch.einsum("brf,bdf->brd", inner, w_out[owner]).flatten(0, 1)[slot]
    weighted = outputs * gates.flatten()[order, None].to(outputs.dtype)
    return weighted.new_zeros(x.shape[0], weighted.shape[1]).index_add(0, token, weighted)
