"""Attention over depth and DenseFormer as they are written down, in NumPy."""

import numpy as np

from rmt_tpu import config as cfg
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks


def of_blocks(mixer: cfg.Mixer, depth: int) -> int:
    return mixer.sublayers_a_block(depth)


def has_ended(k: int, mixer: cfg.Mixer, depth: int) -> bool:
    """Whether site k is right after a block, or before the first one."""
    return k % of_blocks(mixer, depth) == 0 or k == depth


def plain_weights(k, sources, site, params, mixer, depth, epsilon=1e-6):
    """Weights [sources, batch, seq, heads] of flat sources [sources, batch, seq, D] at site k."""
    v = np.stack(sources)
    rms = lambda x: np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
    H, D = mixer.num_heads, v.shape[-1]
    repeated = mixer.cumulative and has_ended(k, mixer, depth)
    if mixer.query == "scalars":
        before = sum(len(plain_sources_of(i, of_blocks(mixer, depth))) for i in range(k))
        logits = params["mixer"]["logits"][before : before + len(v) - repeated]
        logits = np.append(logits, logits[len(logits) - repeated :])[:, None, None, None]
        logits = logits * np.ones((*v.shape[:-1], 1))
    elif mixer.query == "none":
        logits = np.zeros((*v.shape[:-1], 1))
    else:
        query = site["mix"]["query"].reshape(-1)
        if mixer.query == "input":
            query = query + (v[-1] / rms(v[-1])) @ site["mix"]["project"]
        keys = v / rms(v) if mixer.key_norm else v
        if "key_gain" in site["mix"]:
            keys = keys * site["mix"]["key_gain"].reshape(-1)
        logits = (query * keys).reshape(*v.shape[:-1], H, D // H).sum(-1)
    if mixer.newest_bias is not None:
        newest = np.arange(len(v)) == len(v) - 1
        logits = logits + site["mix"]["newest_bias"] * newest[:, None, None, None]
    if mixer.weights == "sigmoid":
        return checks.sigmoid(logits)
    shown = np.ones(len(v), bool)
    if getattr(mixer, "window", None) is not None:
        shown[1 : -mixer.window - repeated] = False
    logits = np.where(shown[:, None, None, None], logits, -np.inf)
    return plain.softmax(logits, 0)


def plain_sources_of(k, S):
    """Which sublayers' outputs (from 1; 0 is the embedding) each source of site k adds up."""
    blocks = [range(n * S + 1, min((n + 1) * S, k) + 1) for n in range(-(-k // S))]
    return [range(0, 1), *blocks]


def attention_over_depth(mixer, params, depth):
    """`mix(k, site, written)` for `plain.model`: equations 2 to 6 with all that was written."""

    def mix(k, site, written):
        shape = written[0].shape
        if mixer.normed_embedding:
            axes = tuple(range(2, len(shape)))
            square = np.mean(written[0] ** 2, axis=axes, keepdims=True)
            written = [written[0] / np.sqrt(square + mixer.epsilon), *written[1:]]
        parts = plain_sources_of(k, of_blocks(mixer, depth))
        if mixer.cumulative:
            parts = [range(part.stop) for part in parts]
            # The running residual is a source at every site.
            parts += [range(k + 1)] if has_ended(k, mixer, depth) else []
        sources = [sum(written[i] for i in part).reshape(*shape[:2], -1) for part in parts]
        if k == depth and mixer.output_site != "attention":
            return (sum(written) if mixer.output_site == "sum" else sources[-1]).reshape(shape)
        w = plain_weights(k, sources, site, params, mixer, depth)
        heads = w.shape[-1]
        v = np.stack(sources)
        split = v.reshape(*v.shape[:-1], heads, -1)
        return np.sum(w[..., None] * split, axis=0).reshape(shape)

    return mix


def dense(mixer, params, depth):
    """DenseFormer's Y of the layer that a site is in, and what that layer has added to it."""
    weights, layers = iter(params["mixer"]["weights"]), depth // 2
    a = np.eye(layers + 1).tolist()
    for i in range(1, layers + 1):
        for j in range(i + 1):
            if i % mixer.period == 0 and (i - j) % mixer.dilation == 0:
                a[i][j] = next(weights)

    def mix(k, site, written):
        outputs = [written[0]]
        for layer in range(layers + 1):
            given = sum(a[layer][j] * outputs[j] for j in range(layer + 1))
            inside = written[2 * layer + 1 : 2 * layer + 3]
            if layer == k // 2:
                return given + sum(inside)
            outputs.append(given + sum(inside))

    return mix


def reference(params, tokens, config):
    system = dense if isinstance(config.mixer, cfg.Dense) else attention_over_depth
    mix = system(config.mixer, params, config.num_sublayers)
    return plain.model(params, tokens, config, mix)
