"""A small experiment whose trials copy each other, for the tests of populations."""

from studied import EXPERIMENT

TEXT = (
    EXPERIMENT.replace("name: small", "name: bred")
    .replace("queries_per_kv: [1, 2]", "queries_per_kv: 1")
    .replace("    sliding_window: {kv_heads: 1, queries_per_kv: 1, head_dim: 8, qk_norm: none, window: [8, 16]}\n", "")
    .replace("position: [none, rotary]", "position: rotary")
    .replace("{low: 1e-3, high: 1e-2, log: true}", "{low: 1e-5, high: 1e-2, log: true}")
    .replace(
        "search: {trials: 30, sampler: tpe, pruner: none, seed: 0}",
        "search: {trials: 8, population: 4, sampler: random, pruner: {pbt: {interval_tokens: 256}}, seed: 0}",
    )
)
"""Populations of four; the best and the worst of four at 256, 512 and 768 of 1,024 tokens."""
RATE = "optimizer.adamw.learning_rate"
