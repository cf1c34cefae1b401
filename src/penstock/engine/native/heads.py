"""Scales of heads' channels for keys and queries that are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import Weight


def channel_scales(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    assisted: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each layer's `qk_scale`, [(num_heads + num_kv_heads) * head_dim], where it has one.

    A head is rounded with one scale, so a few large channels would drown the others: with
    Qwen2.5's biases perplexity rises by 4%. Queries are multiplied by a factor in each channel and
    keys divided by it, which leaves the scores, and both sides as even as they can be at once. How
    large channels are is told by the norms of heads, or the biases; both of a rotary pair get one
    factor, so that it may be applied before the rotation. assisted: what was yielded for the model
    whose keys an assistant reads."""
    heads, found = config.num_heads, dict[int, torch.Tensor]()
    for index in range(config.num_all_layers):
        shape, layer = config.shape(index), f"layers.{index}"
        groups, half = shape.num_kv_heads, shape.head_dim // 2
        if shape.kv_layer < 0:
            keys = (assisted or {}).get(f"layers.{~shape.kv_layer}.qk_scale")
            if keys is not None:
                of_keys = keys[-groups * shape.head_dim :].view(groups, -1)
                factors = of_keys.reciprocal().repeat_interleave(heads // groups, 0)
                yield f"{layer}.qk_scale", factors.flatten()
            continue
        if shape.kv_layer != index:
            # Its keys are divided already.
            if (read := found.get(shape.kv_layer)) is not None:
                yield f"{layer}.qk_scale", read
            continue
        if (norm := weights.get(f"{layer}.k_norm")) is not None:
            own = weights[f"{layer}.q_norm"]
            assert isinstance(norm, torch.Tensor)
            assert isinstance(own, torch.Tensor)
            pair = [x.float().view(1, 2, half) for x in (own, norm)]
            sizes = torch.cat([pair[0].expand(heads, 2, half), pair[1].expand(groups, 2, half)])
        elif (bias := weights.get(f"{layer}.qkv_bias")) is not None:
            assert isinstance(bias, torch.Tensor)
            sizes = bias.float().view(-1, 2, half)[: heads + groups]
        else:
            continue
        pairs = sizes.square().sum(1)
        # The bias is not all of a channel; what else there is has about the median's size.
        pairs += pairs.median(-1, keepdim=True).values.clamp(min=1e-12)
        queries = pairs[:heads].view(groups, -1, half).mean(1)
        powers = (pairs[heads:] / queries).log2() / 4
        powers = (powers - powers.median(-1, keepdim=True).values).repeat(1, 2)
        shared = powers.repeat_interleave(heads // groups, 0)
        found[index] = torch.cat([shared, -powers]).exp2().flatten()
        yield f"{layer}.qk_scale", found[index]
