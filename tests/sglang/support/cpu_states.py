"""The kernels of recurrent states (Qwen3-Next's, "gated delta nets") in plain torch, for a CPU.

SGLang's wheel brings none for a CPU. These take the place of kernels, never of what is tested: SGLang's own pools,
tree, requests and backend keep the states, and say which is copied where. The formulas are those of the paper on gated
delta networks (arXiv 2412.06464): a state S decays by exp(g), then learns beta * (v - S k) at the key k.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens between two of the states that delta_rule gives beside the last one, as SGLang's backend counts them."""


def convolve(
    x: Any, weight: Any, bias: Any = None, query_start_loc: Any = None, cache_indices: Any = None,
    has_initial_state: Any = None, conv_states: Any = None, activation: str | None = "silu", **more: Any,
) -> Any:
    """A causal convolution of requests behind each other. `x`: [width, tokens]; `conv_states`: [slots, width, inputs],
    the last inputs of each, which are read where `has_initial_state`, and written."""
    bounds, done = query_start_loc.tolist(), []
    for at, (first, end) in enumerate(pairwise(bounds)):
        state = conv_states[cache_indices[at]]
        before = state if has_initial_state[at] else torch.zeros_like(state)
        inputs = torch.cat([before, x[:, first:end]], dim=1)
        done.append(F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0])
        state.copy_(inputs[:, -state.shape[1] :])
    out = torch.cat(done, dim=1)
    return F.silu(out) if activation else out


def convolve_one(
    x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None, *, conv_state_indices: Any
) -> Any:
    """One token of each request. `x`: [requests, width]."""
    bounds, known = torch.arange(len(x) + 1), torch.ones(len(x), dtype=torch.bool)
    return convolve(x.T, weight, bias, bounds, conv_state_indices, known, conv_state, activation).T


def gates(a_log: Any, a: Any, b: Any, dt_bias: Any) -> tuple[Any, Any]:
    """(g, beta), [1, tokens, heads]."""
    return (-a_log.float().exp() * F.softplus(a.float() + dt_bias.float()))[None], b.sigmoid()[None]


def delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, initial_state: Any, initial_state_indices: Any, cu_seqlens: Any,
    **more: Any,
) -> tuple[Any, None, Any]:
    """([1, tokens, heads, values], None, the states before each chunk of each request). Writes the last states.

    `q`, `k`, `v`: [1, tokens, heads, width]; `initial_state`: [slots, heads, values, keys]."""
    heads = v.shape[2]
    q, k = (F.normalize(one[0].float(), dim=-1).repeat_interleave(heads // one.shape[2], dim=1) for one in (q, k))
    q *= q.shape[-1] ** -0.5
    decay, bounds = g[0].exp(), cu_seqlens.tolist()
    out, between = torch.empty_like(v[0]), []
    for at, (first, end) in enumerate(pairwise(bounds)):
        kept = initial_state[initial_state_indices[at]]
        state = kept.float()
        for token in range(first, end):
            if (token - first) % CHUNK == 0:
                between.append(state)
            state = state * decay[token, :, None, None]
            learnt = beta[0, token, :, None] * (v[0, token] - (state @ k[token, :, :, None])[..., 0])
            state = state + learnt[..., None] * k[token, :, None]
            out[token] = (state @ q[token, :, :, None])[..., 0]
        kept.copy_(state)
    return out[None], None, torch.stack(between)[None]


def delta_rule_one(
    *, A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, initial_state_source: Any,
    initial_state_indices: Any, cu_seqlens: Any, **more: Any,
) -> Any:
    """One token of each request."""
    g, beta = gates(A_log, a, b, dt_bias)
    return delta_rule(
        q, k, v, g, beta, initial_state=initial_state_source, initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
    )[0]


def keep(conv: Any, states: Any, slots: Any, wanted: Any, kept: Any, requests: int, **more: Any) -> None:
    """Copies the states of the requests that are `wanted` into slots that SGLang's tree will have, in all layers."""
    for pool in (conv, states):
        pool[:, kept[wanted]] = pool[:, slots[wanted]]


def norm_gated(x: Any, gate: Any, weight: Any, bias: None, activation: str, eps: float = 1e-6, **more: Any) -> Any:
    """The norm of `x`, times silu(gate). Both [rows, width]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps) * F.silu(gate)


def bring_states() -> None:
    """Once SGLang is imported."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.srt.arg_groups import mamba_hook

    torch.ops.sgl_kernel.fused_gdn_gating_cpu = gates  # names that SGLang wants when it is imported
    torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu = delta_rule_one
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    fused_norm_gate.rms_norm_gated = norm_gated
    gdn_backend.causal_conv1d_fn, gdn_backend.causal_conv1d_update = convolve, convolve_one
    gdn_triton.chunk_gated_delta_rule = delta_rule
    hybrid_linear_attn_backend.track_mamba_states_all_layers = keep
    # With pages of more than one token SGLang keeps states at their ends, where it knows that the kernels can.
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
