"""One-line slips that somebody could make, for `tests.mutations`: each must turn some test red."""

from typing import NamedTuple


class Slip(NamedTuple):
    """A change of one line.

    Attributes:
      file: where.
      old: what is there, once.
      new: what takes its place.
      tests: the files, or tests by name, that should notice.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(file: str, *tests: str):
    return lambda old, new, *others: Slip(file, old, new, tests + others)


_KERNELS, _MODEL = "tests/pallas_kernels", "tests/rmt_tpu"

# Kernels --------------------------------------------------------------------------------------

_battery = _of(
    "pallas_kernels/key_vector/xla.py",
    f"{_KERNELS}/key_vector_test.py",
    f"{_MODEL}/execution/reversible_test.py",
)
_KEY_VECTOR = (
    _battery("variance = jnp.maximum(squares", "variance = jnp.maximum(total"),
    _battery("through_norm = a - n * mean_of(a * n, mean_an)", "through_norm = a - mean_of(a * n, mean_an)"),
    _battery('if norm == "layernorm":\n        through_norm', 'if norm == "rmsnorm":\n        through_norm'),
    _battery("d_gain = jnp.sum(d_scaled * n,", "d_gain = jnp.sum(a * n,"),
    _battery("return (residual.astype(wide) - written)", "return (residual.astype(wide) + written)"),
    _battery("in_range = jnp.all(jnp.abs(total) <= _LARGEST", "in_range = jnp.any(jnp.abs(total) <= _LARGEST"),
)  # fmt: skip

_kernel = _of("pallas_kernels/key_vector/mosaic_tpu_kernels.py", f"{_KERNELS}/mosaic_tpu_test.py")

_keys = _of("pallas_kernels/key_vector/mosaic_tpu_keys.py", f"{_KERNELS}/mosaic_tpu_test.py")
_again = _of(
    "pallas_kernels/key_vector/mosaic_tpu_kernels.py", f"{_KERNELS}/key_vector_again_test.py"
)
_in_stacks = _of("pallas_kernels/call.py", f"{_KERNELS}/key_vector_again_test.py")
_KEY_VECTOR_TPU = (
    _kernel("above = total if call.centred else", "above = total if not call.centred else"),
    _kernel("slope = -(rstd * rstd * call.unit) * mean_an", "slope = -(rstd * call.unit) * mean_an"),
    _kernel("mean_an = mean_ax * call.unit", "mean_an = mean_ax"),
    _kernel("sums = [previous[i : i + 1] + x for i, x in enumerate(sums)]", "sums = list(sums)"),
    _kernel("d_folded = d_folded - jnp.sum(dz.astype", "d_folded = d_folded + jnp.sum(dz.astype"),
    _kernel("v, x - _written(call, *write, v)", "v, x + _written(call, *write, v)"),
    _kernel("x = x - _ROUND_BITS * (len(writes) - 1)", "x = x - 0 * len(writes)"),
    _kernel('inputs = inputs | {"residual": rebuilt}', "inputs = dict(inputs)"),
    _kernel("return *_add_to_sums(sums, value), least, most", "return *_add_to_sums(sums, value), least, sums[3]"),
    _kernel("(sums[2] < _ROUND - _LARGEST) |", "(sums[2] < -_LARGEST) |"),
    _kernel("offset = offset - slope * mean", "offset = offset + slope * mean"),
    _of("rmt_tpu/residual/matrix.py", f"{_MODEL}/execution/reversible_test.py")("> _KEPT * chip().vmem", "> chip().vmem"),
    _of("rmt_tpu/cores/feed_forward.py", f"{_MODEL}/cores/cores_test.py")("device_lowered_for()) not in", "device_lowered_for()) in"),
    _of("rmt_tpu/execution/reversible.py", f"{_MODEL}/execution/reversible_test.py")("Statistics(Slot(statistics.both, repeat))", "Statistics(Slot(statistics.both, 0))"),
    _of("pallas_kernels/key_vector/mosaic_tpu_call.py", f"{_KERNELS}/mosaic_tpu_test.py")("return cls(1, B, tiles, True)", "return cls(1, B // 2, tiles, True)"),
    _of("pallas_kernels/operand.py", f"{_KERNELS}/causal_attention_slots_test.py")("return chosen[0], *spec", "return 0 * chosen[0], *spec"),
    _in_stacks("(args[at][0], *spec", "(0 * args[at][0], *spec"),
    _in_stacks('index(f"slot_{name}") - len(tables)', "index(f\"slot_{name}\") * 0 - 1"),
    _kernel("product = product - mean * keys.sums(v)", "product = product + mean * keys.sums(v)"),
    _again("_operand(call, residual, v, mean)", "_operand(call, residual, v, 0)"),
    _of("pallas_kernels/key_vector/triton_gpu.py", f"{_KERNELS}/triton_gpu_test.py")("retrieved += above * key_sums", "retrieved += 0 * above * key_sums"),
    _keys("d = d_folded * self.call.unit", "d = d_folded"),
    _keys("jnp.sum(d * self.read_keys[...], axis=0", "jnp.sum(d, axis=0"),
    _keys("+= d * self.of_gain(v)", "+= d"),
    _keys("return self.gain[pl.ds(self.first + v, 1)]", "return self.gain[pl.ds(v, 1)]"),
    _keys("(self.read_keys[...] * self.of_gain(v)).astype", "(self.read_keys[...] * 1).astype"),
    _kernel('read, rebuilt, outputs["retrieved"]', 'read, inputs["residual"], outputs["retrieved"]'),
    _of("pallas_kernels/key_vector/mosaic_tpu.py", f"{_KERNELS}/mosaic_tpu_test.py")("elif since is not None or again is not None:", "elif since is not None:"),
    _of("pallas_kernels/key_vector/xla.py", f"{_KERNELS}/key_vector_test.py")("_take_back(site.residual, *since", "_take_back(site.residual, *(0 * x for x in since)"),
    _of("rmt_tpu/execution/reversible.py", f"{_MODEL}/execution/reversible_test.py")("k % 2 == 0 and k + 1 < count", "k % 2 == 0"),
    _of("rmt_tpu/execution/reversible.py", f"{_MODEL}/execution/reversible_test.py")("deferred = (y, site) if written_for else None", "deferred = None"),
    _of("rmt_tpu/residual/matrix.py", f"{_MODEL}/execution/reversible_test.py")("on_tpu() and chip().hbm <= _SLOW", "on_tpu()"),
    _of("pallas_kernels/compiler/hlo.py", f"{_KERNELS}/compiler/cost_test.py")("total if kernel is None else _declared(kernel, total)", "total"),
    _of("pallas_kernels/compiler/hlo.py", f"{_KERNELS}/compiler/cost_test.py")("attributes = instruction.attributes + line", "attributes = instruction.attributes"),
    _of("rmt_tpu/analysis/step_cost.py", f"{_MODEL}/analysis/step_cost_test.py")("assignment_of(program).temporary", "assignment_of(program).total"),
)  # fmt: skip

_rows = _of(
    "pallas_kernels/key_vector/mosaic_tpu_decode.py", f"{_KERNELS}/key_vector_decode_test.py"
)
_KEY_VECTOR_TPU += (
    _rows("(layer[0], 0, 0)", "(0, 0, 0)"),
    _rows('if call.norm == "layernorm":', 'if call.norm == "rmsnorm":'),
)

_gpu = _of("pallas_kernels/key_vector/triton_gpu_kernels.py", f"{_KERNELS}/triton_gpu_test.py")
_KEY_VECTOR_GPU = (
    _gpu("shift = jnp.where(c == 0, first, shift)", "shift = first"),
    _gpu("outside = jnp.where(steps < 0, -limit, limit)", "outside = limit"),
    _gpu("through_norm = a - n * mean_an", "through_norm = a"),
    _gpu("return (stored.astype(jnp.float32) - written)", "return (stored.astype(jnp.float32) + written)"),
    _gpu("means = [total / (site.K * site.V) for total in totals]", "means = totals"),
)  # fmt: skip

_bank = _of("pallas_kernels/depth_attention/xla.py", f"{_KERNELS}/depth_attention_test.py")
_site = _of(
    "pallas_kernels/depth_attention/mosaic_tpu_kernels.py",
    f"{_KERNELS}/depth_attention_tpu_test.py",
)
_tile = _of(
    "pallas_kernels/depth_attention/mosaic_tpu_matrices_kernels.py",
    f"{_KERNELS}/depth_attention_matrices_test.py",
)
_parts = _of(
    "pallas_kernels/depth_attention/mosaic_tpu_matrices.py",
    f"{_KERNELS}/depth_attention_matrices_test.py",
)
_depth_decode = _of(
    "pallas_kernels/depth_attention/mosaic_tpu_decode.py",
    f"{_KERNELS}/depth_attention_decode_test.py",
)
_DEPTH = (
    _depth_decode("shift = jnp.where(largest == -jnp.inf, 0, largest)", "shift = largest"),
    _depth_decode("p = jnp.where(inputs[\"active\"][0] != 0,", "p = jnp.where(inputs[\"active\"][0] == 0,"),
    _bank("active = (jnp.arange(squares.shape[0]) < count)", "active = (jnp.arange(squares.shape[0]) <= count)"),
    _bank("log_sums = jnp.logaddexp(log_sums, prior[1])", "log_sums = log_sums + prior[1]"),
    _bank("d_sources = d_sources - shrink[..., None] * values", "d_sources = d_sources + shrink[..., None] * values"),
    _bank("d_sources = d_sources + wide(accumulate)", "d_sources = wide(accumulate)"),
    _bank("return mixed + p * (current - mixed)", "return mixed + p * current"),
    _site("m = functools.reduce(jnp.maximum, largest)", "m = largest[0]"),
    _site("total = total + prior", "total = total * 1"),
    _site("row_of(log_sum, group, call.blocks.tokens)", "row_of(m, group, call.blocks.tokens)"),
    _tile("d = of_score[first : first + STEP] - shrink *", "d = of_score[first : first + STEP] + shrink *"),
    _tile("x = jnp.where(i < count, values[rows]", "x = jnp.where(i <= count, values[rows]"),
    _tile("d_logit = p * (1 - p) *", "d_logit = p *"),
    _tile("d_products = jnp.where(exists, d_products, 0)", "d_products = d_products * 1"),
    _parts("d_logits = jnp.where(active, weights * (g - total), 0)", "d_logits = jnp.where(active, weights * g, 0)"),
    _parts("total = total if delta is None else total + by_token(delta)", "total = total * 1"),
)  # fmt: skip

_causal = _of(
    "pallas_kernels/causal_attention/reference.py", f"{_KERNELS}/causal_attention_test.py"
)
_blocks = _of(
    "pallas_kernels/causal_attention/mosaic_tpu_blocks.py", f"{_KERNELS}/causal_attention_test.py"
)
_rows = _of(
    "pallas_kernels/causal_attention/mosaic_tpu_rows.py", f"{_KERNELS}/causal_attention_test.py"
)
_whole = _of(
    "pallas_kernels/causal_attention/mosaic_tpu_whole.py", f"{_KERNELS}/causal_attention_test.py"
)
_cudnn_tests = f"{_KERNELS}/causal_attention_cudnn_test.py"
_cuts = _of(
    "pallas_kernels/causal_attention/block_sizes.py", f"{_KERNELS}/causal_attention_test.py"
)
_entries = _of("pallas_kernels/causal_attention/entries.py", _cudnn_tests)
_cudnn = _of("pallas_kernels/causal_attention/cudnn.py", _cudnn_tests)
_divided = f"{_KERNELS}/causal_attention_divided_test.py"
_ring = _of("pallas_kernels/causal_attention/divided.py", _divided)
_chunk = _of("pallas_kernels/causal_attention/reference.py", _divided)
_CAUSAL = (
    _causal("mask = (queries[:, None] >= jnp.arange(length)", "mask = (queries[:, None] > jnp.arange(length)"),
    _causal("mask = mask & (segment_ids[:, queries, None] ==", "mask = mask | (segment_ids[:, queries, None] =="),
    _causal("d_logits = (scale * weights * (d_weights - delta", "d_logits = (weights * (d_weights - delta"),
    _causal("distance = shift + positions[:, None] - jnp.arange", "distance = shift + positions[:, None] + jnp.arange"),
    _causal("-1, x.shape[3]).sum(axis=3)", "-1, x.shape[3])[:, :, :, 0]"),
    _causal("jnp.repeat(x, each, axis=2) if", "jnp.tile(x, (1, 1, each, 1)) if"),
    _blocks('ref["sum"][head] * shrink + mixed', 'ref["sum"][head] + mixed'),
    _cuts("waits = alone if blocks.heads * each == 1", "waits = alone if False"),
    _blocks("seen = (k_low <= q_high) & (q_low <= k_high)", "seen = k_low <= q_low"),
    _blocks('- ref["delta"][0, head])', ")"),
    _blocks("kind |= _MASKED * _is_masked(call, i, j) |", "kind |="),
    _blocks("offset=later(given.offset, start)", "offset=given.offset"),
    _blocks("first = at.group * (call.step * call.each)", "first = at.group * call.step"),
    _blocks("slot = slot if call.slots > 1 else 0", "slot = 0"),
    _whole("use(*unit, made.pop(0))", "use(*unit, made.pop())"),
    _whole("visible = visible & same", "visible = visible | same"),
    _whole("attend([(i * each, start + n)", "attend([(i * each, n)"),
    _whole("first = sum(group) * call.packed", "first = group[1] * call.packed"),
    _whole("range(0, call.length, call.queries)]", "range(0, call.length, 2 * call.queries)]"),
    _rows("words.at[pl.ds(first, (self", "words.at[pl.ds(0 * first, (self"),
    _rows("scale if part < 2 else None", "scale"),
    _rows("return [as_float(found << 16), as_float(found & jnp.int32(-(2**16)))]", "return [as_float(found & jnp.int32(-(2**16))), as_float(found << 16)]"),
    _rows("total += out * d_out", "total += out"),
    _of("pallas_kernels/causal_attention/__init__.py", f"{_MODEL}/generation/parts_test.py")("sums = sums + slopes * (most - filled)", "sums = sums + 0 * slopes * (most - filled)"),
    _entries("[256 * high, high, 256 * low, low]", "[256 * high, high, 256 * high, low]"),
    _entries("with_last(x, last):\n", "with_last(x, last):\n        last = 0\n"),
    _cudnn("sums = sums - _of_positions(given)", "sums = sums + _of_positions(given)"),
    _cudnn('"CAUSAL" if causal else "NO_MASK"', '"NO_MASK"'),
    _ring("before = other < self.me", "before = other > self.me"),
    _ring("(queries - keys) * self.length", "queries - keys"),
    _ring("d_kv = ring.passed_on(d_kv)  # home", "# home"),
    _ring("jnp.where(swapped, even, odd)])", "jnp.where(swapped, odd, even)])"),
    _chunk("inside & (of_queries[:, queries, None] ==", "inside | (of_queries[:, queries, None] =="),
    _of("rmt_tpu/cores/attention.py", f"{_MODEL}/training/sharded_test.py")("return own_tokens(context.query_positions, self._ring)", "return context.query_positions[:, : context.query_positions.shape[1] // sharding.axis_size(self._ring or ())]"),
)  # fmt: skip

# Residual systems -----------------------------------------------------------------------------

_decoder = (f"{_MODEL}/decoder_test.py",)
_matrix = _of("rmt_tpu/residual/matrix.py", *_decoder)
_vector = _of("rmt_tpu/residual/vector.py", *_decoder)
_depth = _of("rmt_tpu/residual/depth_attention.py", f"{_MODEL}/residual/depth_attention_test.py")
_dense = _of("rmt_tpu/residual/dense.py", f"{_MODEL}/residual/depth_attention_test.py")
_lstm = _of("rmt_tpu/residual/depth_lstm.py", f"{_MODEL}/residual/depth_lstm_test.py")
_highway = _of("rmt_tpu/residual/highway.py", f"{_MODEL}/residual/highway_test.py")
_tree = _of("rmt_tpu/residual/hierarchical.py", f"{_MODEL}/residual/hierarchical_test.py")
_streams = _of(
    "rmt_tpu/residual/hyper_connections.py",
    f"{_MODEL}/residual/hyper_connections_test.py",
    f"{_MODEL}/residual/hyper_connections_sites_test.py",
)
_RESIDUAL = (
    _of("rmt_tpu/residual/matrix.py", f"{_MODEL}/decoder_test.py::test_storage_starts_smaller_by_depth")("self.position_keys = store_keys(rngs, rank, self.key_dim)", "self.position_keys = store_keys(rngs, rank, self.key_dim, scale=2.0)"),
    _matrix("return jnp.moveaxis(last, -1, 1), tokens", "return jnp.zeros(shape, tokens.dtype), tokens"),
    _vector("return residual + self.tiles.widened(", "return self.tiles.widened("),
    _depth("return query if self.key_gain is None else query * self.key_gain[...]", "return query"),
    _depth("return sublayer // self.block + 1", "return sublayer // self.block"),
    _depth("active = at.sublayer % self.block > 0", "active = at.sublayer % self.block > 1"),
    _of("rmt_tpu/residual/depth_ablations.py", f"{_MODEL}/residual/counts_test.py")("return every if window is None else [0, *every[1:][-window:]]", "return every"),
    _dense("matrix = jnp.eye(self.num_rows", "matrix = jnp.ones(2 * (self.num_rows,)"),
    _lstm("cell = state.kept + state.admitted * written", "cell = state.kept + written"),
    _highway("return State(closed * h + added, None), z", "return State(h + added, None), z"),
    _tree("inputs = jax.lax.dynamic_update_index_in_dim(inputs, h, done % self.every, 0)", "inputs = jax.lax.dynamic_update_index_in_dim(inputs, h, 0, 0)"),
    _streams("a = a / jnp.sum(a, axis=0, keepdims=True)", "a = a / jnp.sum(a, axis=1, keepdims=True)"),
    _streams("2 * jax.nn.sigmoid(a_post * given[m : 2 * m]", "jax.nn.sigmoid(a_post * given[m : 2 * m]"),
)  # fmt: skip

# Layers and schedules -------------------------------------------------------------------------

_layers = (f"{_MODEL}/layers/layers_test.py", *_decoder)
_LAYERS = (
    _of("rmt_tpu/cores/attention.py", *_decoder)("scale / (index // 2 + 1) if", "scale / (index // 2 + 2) if"),
    _of("rmt_tpu/cores/attention.py", *_decoder)("mask = queries[:, :, None] >= keys", "mask = queries[:, :, None] > keys"),
    _of("rmt_tpu/cores/positions.py", *_layers)("return _rotate_first(d_x, -positions, heads", "return _rotate_first(d_x, positions, heads"),
    _of("rmt_tpu/cores/positions.py", *_layers)("turned = [first * cos - second * sin", "turned = [first * cos + second * sin"),
    _of("rmt_tpu/layers/norm.py", *_layers)("        x = x - mean(x)\n", "        x = x - jnp.mean(x)\n"),
    _of("rmt_tpu/layers/embedding.py", f"{_MODEL}/decoder_test.py::test_mup_multipliers_act_where_they_should")("rows = self.multiplier * jnp.take", "rows = jnp.take"),
    _of("rmt_tpu/layers/stacks.py", f"{_MODEL}/residual/depth_attention_test.py")("return jax.lax.dynamic_update_index_in_dim(d_stack, d_slice, jnp.asarray(index), 0), None", "return d_stack, None"),
    _of("rmt_tpu/execution/reversible.py", f"{_MODEL}/execution/reversible_test.py")("return _slot(written, k - 1, repeat)", "return _slot(written, k, repeat)"),
    _of("rmt_tpu/execution/reversible.py", f"{_MODEL}/execution/reversible_test.py")("return Slot(written[k], repeat + 1 if shifted", "return Slot(written[k], repeat if shifted"),
    _of("rmt_tpu/execution/reversible.py", f"{_MODEL}/execution/reversible_test.py")("jnp.roll(x, 1, 0)", "jnp.roll(x, -1, 0)"),
    _of("rmt_tpu/execution/remat.py", f"{_MODEL}/execution/remat_test.py")("d_shared = jax.tree.map(jnp.add, d_shared, of_one)", "d_shared = of_one"),
    _of("rmt_tpu/execution/banked.py", f"{_MODEL}/residual/depth_attention_test.py")(" + stacks.run_of(gradients.scores, start, layers)", ""),
    _of("rmt_tpu/execution/banked.py", f"{_MODEL}/residual/depth_attention_test.py")("jax.lax.fori_loop(0, offset, add, summed)", "jax.lax.fori_loop(0, 1, add, summed)"),
    _of("rmt_tpu/execution/banked_writes.py", f"{_MODEL}/residual/depth_attention_test.py")("empty = place.sublayer == place.group", "empty = False"),
    _of("rmt_tpu/execution/pipelined.py", f"{_MODEL}/execution/pipelined_test.py")("first = jnp.where(pipeline.is_last(), of_last, first)", "first = of_last"),
)  # fmt: skip

# Cores ----------------------------------------------------------------------------------------

_cores = f"{_MODEL}/cores/cores_test.py"
_equations = f"{_cores}::test_a_model_of_many_cores_follows_their_equations"
_ways = f"{_cores}::test_decoding_and_unrolled_layers_are_the_model"
_attention = _of("rmt_tpu/cores/attention.py", _equations)
_mla = _of("rmt_tpu/cores/mla.py", _equations)
_kda = _of("rmt_tpu/cores/kda.py", _cores)
_linear = _of(
    "pallas_kernels/delta_attention/xla.py", "tests/pallas_kernels/delta_attention_test.py"
)
_delta_kernels = _of(
    "pallas_kernels/delta_attention/mosaic_tpu_kernels.py",
    "tests/pallas_kernels/delta_attention_test.py::test_kernels_are_the_recurrence_and_its_gradient",
)
_spread = f"{_MODEL}/cores/experts_test.py"
_experts = _of(
    "rmt_tpu/cores/experts.py",
    _spread,
    f"{_MODEL}/training/sharded_test.py::test_experts_on_a_mesh_are_those_of_one_device",
)
_logits = _of("pallas_kernels/logits/mosaic_tpu.py", "tests/pallas_kernels/logits_test.py")
_grouped = "tests/pallas_kernels/grouped_matmul_test.py"
_scalars = lambda file, old, new: Slip(file, old, new, (f"{_MODEL}/cores/aux_test.py",))
_CORES = (
    _attention("k = normalize(k, self.key_gain[...], **norm)", "k = normalize(k, self.query_gain[...], **norm)"),
    _mla("first = x.shape[-1] - self.core.rope_dim", "first = self.core.rope_dim"),
    _of("rmt_tpu/cores/mla.py", _ways)("latent, k_rope = jnp.split(down, [self.core.kv_rank], axis=-1)\n        return q, normalize(latent, self.kv_gain[...], **norm), k_rope", "latent, k_rope = jnp.split(down, [self.core.kv_rank], axis=-1)\n        return q, latent, k_rope", _equations),
    _of("rmt_tpu/cores/feed_forward.py", _equations)("return _ACTIVATIONS[self.activation](gate) * up", "return gate * _ACTIVATIONS[self.activation](up)"),
    _of("rmt_tpu/layers/stacks.py", _equations)("return d_stack, jnp.where(whole, d_slice, 0), None, None", "return d_stack, d_slice, None, None"),
    _of("rmt_tpu/residual/depth_attention.py", _equations)("return Grouping(layers, False, into > 0 or goes_on, rows)", "return Grouping(layers, False, into > 0, rows)"),
    _of("rmt_tpu/residual/vector.py", _equations)("kept = (w for w in (site.read, site.read_fewer) if w is not None)", "kept = (w for w in (site.read_fewer, site.read) if w is not None)"),
    _linear("sees = (documents == before[:, None])", "sees = (documents >= before[:, None])"),
    _linear("behind = behind + jnp.concatenate([of_lower, none], axis=-3)", "behind = behind + jnp.concatenate([none, none], axis=-3)"),
    _linear("inverse = _joined(inverse, -dot(dot(second, below), first))", "inverse = _joined(inverse, -below)"),
    _delta_kernels("as_float(documents == last))", "as_float(documents == before))"),
    _delta_kernels("d_total += jnp.where(at_end, d_state_decay, 0)", "d_total += jnp.where(at_end, 0, 0)"),
    _kda("state = jnp.where(begun[:, None, None, None], state, 0)", "state = jnp.where(begun[:, None, None, None], state, state)"),
    _kda("log_decay = jnp.where(there[..., None, None], log_decay, 0)", "log_decay = jnp.where(there[..., None, None], log_decay, -1)"),
    _kda("return -rate * jax.nn.softplus(z)", "return -jax.nn.softplus(rate * z)"),
    _experts("bias = rate * self.load[...]", "bias = -rate * self.load[...]"),
    _experts("weights = jnp.take_along_axis(scores, chosen", "weights = jnp.take_along_axis(biased, chosen"),
    _experts("ends = jnp.minimum(wanted, room)", "ends = wanted"),
    _experts("loads = sharding.total(of_rows, sharding.token_axes())", "loads = of_rows"),
    _experts("dropped = rows.dropped / sharding", "dropped = 0 * rows.dropped / sharding"),
    _experts("order = jnp.argsort(expert)", "order = jnp.argsort(-expert)"),
    _experts("edge = (at + jnp.clip(within, 0, 1))", "edge = (at - jnp.clip(within, 0, 1))"),
    _of("pallas_kernels/grouped_matmul/mosaic_tpu.py", _grouped)('options = {"transpose_rhs": transposed,', 'options = {"transpose_rhs": not transposed,'),
    _of("pallas_kernels/grouped_matmul/xla.py", _grouped)("return _ragged(rows, matrices, sizes, ((1,),", "return _ragged(rows, matrices, sizes * (not transposed), ((1,),"),
    _of("pallas_kernels/grouped_matmul/triton_gpu.py", _grouped)("within = tile - (behind - needed)[group]", "within = tile - behind[group]"),
    _of("pallas_kernels/grouped_matmul/triton_gpu.py", _grouped)("b = _load(ref.d_products, (), own, (column, blocks.columns), stop)", "b = _load(ref.d_products, (), own, (column, blocks.columns))"),
    _of("pallas_kernels/token_rows/__init__.py", "tests/pallas_kernels/token_rows_test.py")("return x[order // each]", "return x[order % len(x)]"),
    _of("pallas_kernels/token_rows/mosaic_tpu.py", "tests/pallas_kernels/token_rows_test.py")("jnp.where(jnp.arange(count) < jnp.sum(sizes), order // each, tokens)", "order // each"),
    _of("pallas_kernels/token_rows/xla.py", "tests/pallas_kernels/token_rows_test.py")("places.reshape(-1, each).T", "places.reshape(each, -1)"),
    _logits("words = jnp.where(targets < vocab, targets, -1)", "words = targets"),
    _logits("if vocab % columns:", "if False:"),
    _logits('outputs["sum"][at, :] * jnp.exp(before - most)', 'outputs["sum"][at, :]'),
    _logits('b=out["sum"]', 'b=1.0'),
    _logits("own = round_up(-(-count // chip().cores), 16)", "own = round_up(count, 16)"),
    _of("rmt_tpu/training/optimizer.py", _spread)("return jnp.sign(jnp.mean(shares, axis=-1, keepdims=True) - shares)", "return jnp.sign(shares - jnp.mean(shares, axis=-1, keepdims=True))"),
    _of("rmt_tpu/training/optimizer.py", _spread)("optimizer.update(of_weights(gradients, roles), state, params)", "optimizer.update(gradients, state, params)"),
    _of("rmt_tpu/layers/short_convolution.py", _cores)("own = (ids == segment_ids).reshape(", "own = (ids >= segment_ids - 1).reshape("),
    _of("rmt_tpu/residual/whole_tiles.py", f"{_MODEL}/residual/depth_attention_test.py")("return epsilon * self.size / self.held", "return epsilon"),
    _scalars("rmt_tpu/cores/core.py", "return pullback((d_y, {name: d_aux[name].astype", "return pullback((d_y, {name: 0 * d_aux[name].astype"),
    _scalars("rmt_tpu/execution/layer.py", "return y, None, add_aux(aux, of_core)", "return y, None, aux | of_core"),
    _scalars("rmt_tpu/execution/banked.py", "= pullback((d_prior, d_rows, d_current, d_aux))", "= pullback((d_prior, d_rows, d_current, zeros))"),
    _scalars("rmt_tpu/training/loss.py", 'objective = loss.objective + aux["loss"] if', 'objective = loss.objective + sum(aux.values()) if'),
    _of("rmt_tpu/config/cores.py", _cores)("found.append(Stack(cores, repeat))", "found.append(Stack(cores, max(1, repeat - 1)))"),
    _of("rmt_tpu/training/workdir.py", f"{_MODEL}/training/older_run_test.py")('"layers/feed_forward": "stacks/0/1/core",', '"layers/feed_forward": "stacks/0/0/core",'),
)  # fmt: skip

# Meshes ---------------------------------------------------------------------------------------

_mesh = f"{_MODEL}/training/sharded_test.py"
_devices = _of("sharding/per_device.py", "tests/sharding/per_device_test.py", _mesh)
_stages = "tests/sharding/pipeline_test.py"
_pipeline, _carried = _of("sharding/pipeline.py", _stages), _of("sharding/carried.py", _stages)
_schedule = _of("sharding/schedule.py", _stages)
_SHARDING = (
    _devices("return jax.lax.psum(jax.lax.optimization_barrier(x), names) if names else x", "return x"),
    _devices("return jax.lax.all_to_all(x, used, split, join", "return jax.lax.all_to_all(x, used, join, split"),
    _devices("return jax.lax.dynamic_slice_in_dim(x, axis_index(names) * size, size, axis)", "return jax.lax.dynamic_slice_in_dim(x, 0, size, axis)"),
    _pipeline("return add(total, terms), add(gradients.last, d_last), d_result", "return add(total, terms), d_last, d_result"),
    _pipeline("return jax.tree.map(lambda x: x * cotangents[0].astype(x.dtype), gradients), None", "return gradients, None", f"{_MODEL}/execution/pipelined_test.py"),
    _carried("state = jax.lax.cond(here.chunk == 0, begin,", "state = jax.lax.cond(here.virtual == 0, begin,"),
    _carried("return state, after, add(sums, terms)", "return state, after, terms"),
    _carried("d_first = self._add_first(here.chunk == 0, *given)", "d_first = self._add_first(here.virtual == 0, *given)"),
    _of("sharding/banked.py", _stages)("done = here.active & (here.virtual == 0)", "done = here.active & (here.chunk == 0)"),
    _schedule("virtual = order(within // self.stages)", "virtual = order(within % self.stages)"),
    _schedule("return self._in(2 * (self.chunks - first * self.stages) - 1)", "return self._in(2 * (self.chunks - first * self.stages) - 2)"),
    _schedule("return self._in((self.virtual - 1) * self.stages + 1)", "return self._in(self.virtual * self.stages)"),
    _of("pallas_kernels/key_vector/sharded.py", f"{_KERNELS}/key_vector_sharded_test.py")("every = gather(jnp.stack(own, axis=1), key_axis)", "every = gather(jnp.stack(own[::-1], axis=1), key_axis)", _mesh),
)  # fmt: skip

# Training and generation ----------------------------------------------------------------------

_step = (f"{_MODEL}/training/step_test.py",)
_of_step = _of("rmt_tpu/training/step.py", *_step)
_not_finite = _of(
    "rmt_tpu/training/step.py",
    f"{_step[0]}::test_a_step_that_is_not_finite_changes_nothing_and_is_counted",
)
_loss = _of("rmt_tpu/training/loss.py", *_step)
_copies = lambda file, right, wrong: _of(f"rmt_tpu/{file}", f"{_MODEL}/training/copies_test.py")(
    right, wrong
)
_optimizer = _of("rmt_tpu/training/optimizer.py", *_step)
_generation = (f"{_MODEL}/generation/generate_test.py",)
_serving = f"{_MODEL}/serving"
_sampling = _of("rmt_tpu/generation/sampling.py", *_generation)
_slices = _of(
    "pallas_kernels/compiler/collectives.py",
    f"{_KERNELS}/compiler/programs_test.py::test_what_goes_between_slices_is_told_apart",
)
_TRAINING = (
    _not_finite("optimizer_state = jax.tree.map(keep, optimizer_state, state.optimizer)", "optimizer_state = optimizer_state"),
    _not_finite("skipped_in_a_row=jnp.where(finite, 0,", "skipped_in_a_row=jnp.where(~finite, 0,"),
    _of_step("loss = jax.tree.map(lambda summed: summed / total, loss)", "loss = jax.tree.map(lambda summed: summed / part.weights.size, loss)"),
    _loss("gradient = softmax * (1 + 2 * z_loss * log_z[:, None])", "gradient = softmax * (1 + z_loss * log_z[:, None])"),
    _copies("training/copies.py", 'axes[f"{path}[0]"] == "layer" and not exact[path]', 'axes[f"{path}[0]"] == "layer"'),
    _copies("training/run.py", "paths = frozenset() if schedule else copied(abstract, dtype)", "paths = copied(abstract, dtype)"),
    _copies("training/step.py", "own_copies = copies(params)", "own_copies = copies(state.params)"),
    _copies("training/step.py", "grads, loss = gradients(as_read(state.params, state.copies), batch)", "grads, loss = gradients(state.params, batch)"),
    _of("rmt_tpu/training/trainer.py", f"{_MODEL}/training/trainer_test.py")("self.state._replace(copies={}),", "self.state,"),
    _of("sharding/per_device.py", f"{_MODEL}/analysis/preflight_test.py")("jax.lax.psum(jax.lax.optimization_barrier(x), names)", "jax.lax.psum(x, names)"),
    _loss("return (d_x * scale.astype(d_x.dtype)", "return (d_x * 1"),
    _optimizer("decays * config.weight_decay / rate", "decays * config.weight_decay"),
    _of("rmt_tpu/residual/depth_attention.py", f"{_MODEL}/training/parametrization_test.py")("fan_in = config.residual_size", "fan_in = 1"),
    _of("rmt_tpu/residual/matrix.py", f"{_MODEL}/training/parametrization_test.py")("(ratio if writes else 1 / ratio)", "(ratio if not writes else 1 / ratio)"),
    _of("rmt_tpu/layers/norm.py", f"{_MODEL}/layers/layers_test.py")("narrow = x.dtype == jnp.bfloat16", "narrow = True"),
    _of("rmt_tpu/layers/norm.py", f"{_MODEL}/layers/layers_test.py")("        x = x - centre\n", ""),
    _of("rmt_tpu/layers/parameters.py", f"{_MODEL}/training/step_test.py::test_each_weight_learns_by_its_own_fan_in")('axes=axes, fan_in=count)', 'axes=axes, fan_in=key_dim)'),
    _optimizer("excluded = (*config.decay_exclude, *COUNTED)", "excluded = COUNTED"),
    _sampling("before = jnp.cumsum(probabilities, axis=-1) - probabilities", "before = jnp.cumsum(probabilities, axis=-1)"),
    _sampling("jnp.arange(logits.shape[-1]) < top_k[:, None]", "jnp.arange(logits.shape[-1]) <= top_k[:, None]"),
    _sampling("jax.random.fold_in(jax.random.key(seed), position)", "jax.random.key(seed)"),
    _of("rmt_tpu/generation/programs.py", *_generation)("start = jnp.where(running, rows.cache.length, 0)", "start = rows.cache.length"),
    _of("rmt_tpu/generation/programs.py", f"{_MODEL}/generation/mesh_test.py")("slot = slot - sharding.axis_index(_BATCH) * count", "slot = slot + 0"),
    _of("rmt_tpu/generation/key_heads.py", f"{_MODEL}/generation/mesh_test.py")("jnp.repeat(x.reshape(*x.shape[:3], groups, -1), times, axis=3)", "jnp.tile(x.reshape(*x.shape[:3], groups, -1), (times, 1))"),
    _of("rmt_tpu/decoder.py", f"{_MODEL}/generation/mesh_test.py")("place -= sharding.axis_index(axes) * z.shape[1]", "place -= 0"),
    _of("rmt_tpu/residual/matrix.py", f"{_MODEL}/generation/mesh_test.py")('positions.shape[0] > 1 or "key" in sharding.token_axes()', "positions.shape[0] > 1"),
    _of("rmt_tpu/cores/mla.py", f"{_MODEL}/generation/parts_test.py")("seen = (places >= first) & (places < start[:, None])", "seen = places < start[:, None]"),
    _of("rmt_tpu/generation/programs.py", *_generation)("length = rows.cache.length + running", "length = rows.cache.length"),
    _of("rmt_tpu/generation/text.py", *_generation)("keep = max((_overlap(self.held, s) for s in self.stop), default=0)", "keep = 0"),
    _of("rmt_tpu/cores/core.py", f"{_MODEL}/decoder_test.py")("start[:, None] + jnp.arange(new.shape[1])", "start[:1, None] + jnp.arange(new.shape[1])"),
    _of("rmt_tpu/generation/generate.py", *_generation)("room = max_length + 1 - prompt_tokens", "room = max_length - prompt_tokens"),
    _of("rmt_tpu/generation/engine.py", f"{_MODEL}/generation/engine_test.py")("not (rows_run and self.read >= self.slots)", "True"),
    _of("rmt_tpu/serving/answers.py", f"{_serving}/answers_test.py")("count = sum(offset < self.told for", "count = sum(offset <= self.told for"),
    _of("rmt_tpu/serving/protocol.py", f"{_serving}/protocol_test.py")("room = served.max_length + 1 - tokens", "room = served.max_length - tokens"),
    _of("rmt_tpu/serving/app.py", f"{_serving}/app_test.py")("self._front.worker.cancel(self._job)", "pass"),
    _of("rmt_tpu/serving/worker.py", f"{_serving}/app_test.py")("            del self._open[said.number]\n            self._engine.forget(said.number)", "            del self._open[said.number]"),
    _of("rmt_tpu/training/growth.py", f"{_MODEL}/training/growth_test.py::test_moments_of_new_entries")('{"mu": "zeros", "nu": "squared"}', '{"mu": "zeros", "nu": "zeros"}'),
    _of("rmt_tpu/analysis/decode.py", f"{_MODEL}/analysis/decode_test.py")("size = case.batch * size // variable.shape[0]", "pass"),
    _of("rmt_tpu/analysis/decode.py", f"{_MODEL}/analysis/decode_test.py")("(1 - idle**case.batch)", "(1 - idle)"),
    _of("rmt_tpu/analysis/decode.py", f"{_MODEL}/analysis/decode_test.py")("size = min(written, module", "size = max(written, module"),
    _slices("sent = operand * (devices - own)\n", "sent = operand\n"),
    _slices("own = sum(i // _SLICE == groups[0][0] // _SLICE for i in groups[0])", "own = 1"),
    _slices("mesh = _of_slice(mesh, ids)", "mesh = dict(mesh)"),
    _slices("done.index(True)]", "len(order)]"),
    _of("pallas_kernels/compiler/hlo.py", f"{_KERNELS}/compiler/schedule_test.py::test_a_scatter_writes_what_it_is_given")('"scatter": 2}', '"scatter": 1}'),
    _of("pallas_kernels/compiler/hlo.py", f"{_KERNELS}/compiler/schedule_test.py::test_a_view_in_another_tiling_moves_nothing")('(user.opcode == "bitcast" or _is_view(user))', '(user.opcode == "bitcast")'),
    _of("pallas_kernels/compiler/hlo.py", f"{_KERNELS}/compiler/cost_test.py")("instruction.arrays, instruction.cycles, read, parts", "instruction.arrays, instruction.cycles, parts"),
    _of("rmt_tpu/cost.py", f"{_MODEL}/config/presets_test.py::test_analytic_parameters_are_those_of_the_decoder")("(WHOLE, 1)] if learned", "(WHOLE, 2)] if learned"),
)  # fmt: skip

# Checkpoints, storage, data, configs ----------------------------------------------------------

_saved = f"{_MODEL}/checkpoint"
_kept = _of("rmt_tpu/checkpoint/retention.py", f"{_saved}/retention_test.py")
_manifest = _of("rmt_tpu/checkpoint/manifest.py", f"{_saved}/damage_test.py")
_local = _of("rmt_tpu/storage/local.py", f"{_MODEL}/storage/folder_test.py")
_gcs = _of("rmt_tpu/storage/gcs.py", f"{_MODEL}/storage/folder_test.py")
_batches = _of("rmt_tpu/data/batches.py", f"{_MODEL}/data/batches_test.py")
_STORED = (
    _kept("kept = set(steps[-self.last :])", "kept = set(steps[: self.last])"),
    _kept("keep = step in kept or step > max(kept)", "keep = step in kept"),
    _manifest('if sealed["crc32"] != _checksum(content):', 'if sealed["crc32"] is None:'),
    _of("rmt_tpu/checkpoint/manifest.py", f"{_saved}/damage_test.py::test_a_manifest_that_no_save_writes_is_refused")("if len(named) < len(arrays) or", "if"),
    _of("rmt_tpu/checkpoint/arrays.py", f"{_saved}/async_test.py")("addressable_shards if s.replica_id == 0]", "addressable_shards]"),
    _of("rmt_tpu/checkpoint/arrays.py", f"{_saved}/checkpointer_test.py")("if not shared and not processes.is_first():", "if not processes.is_first():"),
    _of("rmt_tpu/checkpoint/arrays.py", f"{_saved}/damage_test.py")('"fill_missing_data_reads": False', '"fill_missing_data_reads": True'),
    _of("rmt_tpu/checkpoint/save.py", f"{_saved}/async_test.py")("return jax.device_put(values, pinned, may_alias=False)", "return values"),
    _of("rmt_tpu/checkpoint/save.py", f"{_saved}/checkpointer_test.py")("found.generation == self.damaged\n            and", "", f"{_saved}/damage_test.py"),
    _local("file.truncate(before)", "pass"),
    _local('written = self._kv.write(name, data, if_equal=before.stamp.generation).result()', 'written = self._kv.write(name, data).result()'),
    _gcs("self._upload(self._blob(name), data, if_generation_match=0)", "self._upload(self._blob(name), data)"),
    _of("rmt_tpu/storage/gcs.py", f"{_MODEL}/storage/faults_test.py::TestFaults::test_what_a_killed_append_leaves_is_no_name")("return sorted(n for n in found if not _TAIL.search(n))", "return sorted(found)"),
    _batches("begins[:, 0] = True", "begins[:, 0] = False"),
    _batches("real[:, :-1] &= (window < self.num_windows)[:, None]", "real[:, :-1] &= True"),
    _batches("if held + sizes[text] <= wanted:", "if held <= wanted:"),
    _of("rmt_tpu/data/permutation.py", f"{_MODEL}/data/permutation_test.py")("while (outside := words >= size).any():", "if (outside := words >= size).any():"),
    _of("rmt_tpu/data/token_store.py", f"{_MODEL}/data/prepare_test.py::test_tokens_are_as_wide_as_the_vocabulary_needs")("np.uint16 if self.vocab_size <= 2**16", "np.uint16 if self.vocab_size <= 2**17"),
    _of("rmt_tpu/data/token_store.py", f"{_MODEL}/data/token_store_test.py")("pieces.append((at - start, number, at - begin, min(stop, end) - begin))", "pieces.append((at - start, number, at - begin, end - begin))"),
)  # fmt: skip

_presets = f"{_MODEL}/config/presets_test.py"
_limits = f"{_MODEL}/residual/depth_limits_test.py"
_mixers = _of(
    "rmt_tpu/config/mixers.py",
    f"{_limits}::test_blocks_can_be_counted_in_layers_or_sublayers",
    f"{_limits}::test_two_block_sizes_are_refused",
)
_overrides = _of("rmt_tpu/config/overrides.py", f"{_MODEL}/config/overrides_test.py")
_auto = _of("rmt_tpu/training/run.py", f"{_MODEL}/training/resolved_test.py")
_outgrows = _of(
    "rmt_tpu/training/trainer.py",
    f"{_MODEL}/training/trainer_test.py::test_a_residual_that_outgrows_int16_goes_on_in_float32",
)
_CONFIG = (
    _mixers("size = -(-sublayers // min(blocks, sublayers))", "size = sublayers // min(blocks, sublayers)"),
    _mixers("if len(given) > 1:", "if len(given) > 2:"),
    _overrides('return None if value in (None, "none") else', "return None if value is None else"),
    _overrides("            node[key] = value", "            node[key] = node.get(key, value)"),
    _of("rmt_tpu/config/model.py", f"{_MODEL}/execution/reversible_test.py::test_policies_and_dtypes_that_do_not_fit_are_refused")('if self.remat != "reversible" and dtype == "int16":', 'if self.remat == "dots" and dtype == "int16":'),
    _of("rmt_tpu/config/model.py", _presets)("return key_dim, self.data_shape[1]", "return key_dim, self.data_shape[0]"),
    _of("sharding/rules.py", "tests/sharding/mesh_test.py", _mesh)("if size % shards:", "if size < shards:"),
    _auto('if kept.get("model.remat") in legal:', 'if kept.get("model.remat") in ():'),
    _auto('model.store.dtype != "bfloat16" and stages == 1', 'model.store.dtype != "bfloat16"'),
    _auto('if outgrown and model.store.dtype == "auto"', "if outgrown"),
    _of("rmt_tpu/training/trainer.py", f"{_MODEL}/training/trainer_test.py::test_how_many_skipped_steps_int16_is_left_for")("max(2 * most, step / 100)", "max(most, step / 100)"),
    _outgrows("                    or self.outgrown\n", ""),
    _outgrows('may_outgrow and config.model.store.dtype == "int16",', 'config.model.store.dtype == "int16",'),
)  # fmt: skip

_EVAL = f"{_MODEL}/evaluation"
_scores = _of("rmt_tpu/evaluation/scores.py", f"{_EVAL}/scorer_test.py")
_scorer = _of("rmt_tpu/evaluation/scorer.py", f"{_EVAL}/scorer_test.py")
_documents = _of("rmt_tpu/evaluation/documents.py", f"{_EVAL}/documents_test.py")
_tasks = _of("rmt_tpu/evaluation/tasks.py", f"{_EVAL}/documents_test.py")
_figures = _of("rmt_tpu/evaluation/metrics.py", f"{_EVAL}/metrics_test.py")
_asking = _of("rmt_tpu/evaluation/evaluate.py", f"{_EVAL}/evaluate_test.py")
_live = _of("rmt_tpu/training/run.py", f"{_MODEL}/training/task_metrics_test.py")
_hub = f"{_MODEL}/hub/folder_test.py"
_weights = _of("rmt_tpu/hub/weights.py", _hub)
_of_config = _of("rmt_tpu/hub/models.py", _hub)
_origin = _of("rmt_tpu/training/origin.py", f"{_MODEL}/training/origin_test.py")
_muon = _of("rmt_tpu/training/optimizer.py", f"{_MODEL}/training/muon_test.py")
_EVALUATION = (
    _muon("scale = config.update_rms * max(x.shape[-2:]) ** 0.5", "scale = config.update_rms * min(x.shape[-2:]) ** 0.5"),
    _of("rmt_tpu/layers/parameters.py", f"{_MODEL}/training/muon_test.py")('OF_MANY = ("layer", "node", "expert", "projection", "stream")', 'OF_MANY = ("layer", "node", "expert", "stream")'),
    _muon("jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)", "jnp.linalg.norm(wide)"),
    _muon("optax.trace(config.momentum, nesterov=True)", "optax.trace(config.momentum)"),
    _scores("logits = unembedding.multiplier * logits", "logits = 1.01 * logits"),
    _scores("chunks = -(-jnp.sum(wanted >= 0) // chunk)", "chunks = jnp.sum(wanted >= 0) // chunk"),
    _scores("jnp.argmax(logits, axis=1) == target", "of_target >= jnp.mean(logits, axis=1)"),
    _scorer("whole = np.concatenate(request)[-(self.max_length + 1) :]", "whole = np.concatenate(request)[: self.max_length + 1]"),
    _scorer("stop = min(requests[number].length, limit)", "stop = limit"),
    _scorer("targets[row, read - scored : read] = request.continuation", "targets[row, read - scored : read] = whole[-scored - 1 : -1]"),
    _scorer("weight = (place * jnp.uint32(2654435761)) | jnp.uint32(1)", "weight = jnp.uint32(1)"),
    _documents("scored = min(stride, len(tokens) - stop)", "scored = min(max_length, len(tokens) - stop)"),
    _documents("start = max(stop - max_length - 1, 0)", "start = max(stop - max_length, 0)"),
    _documents("requests.append(Request(np.concatenate([bos, whole[:before]]), whole[before:]))", "requests.append(Request(whole[:before], whole[before:]))"),
    _documents("gold.append(-of_choices[document.gold])", "gold.append(-of_choices[0])"),
    _documents("per_character = of_choices / np.array(document.lengths)", "per_character = of_choices"),
    _documents("    kept = context.rstrip()", "    kept = context"),
    _tasks("begins = f\"{_text(line, 'ctx_a')} {_text(line, 'ctx_b').capitalize()}\"", "begins = f\"{_text(line, 'ctx_a')} {_text(line, 'ctx_b')}\""),
    _figures("return math.sqrt(count / (count - 1) * math.fsum(np.square(influence)))", "return math.sqrt(math.fsum(np.square(influence)))"),
    _figures("error = _error(one.influence - other.influence)", "error = _error(one.influence + other.influence)"),
    _figures("(self.total - self.rate * self.weight)", "(self.total - self.rate)"),
    _asking("self.left = [number for number in range(count) if number not in self.kept]", "self.left = list(range(count))"),
    _asking("    finally:\n        for source in sources:", "    finally:\n        for source in ():"),
    _live('over = PartitionSpec((*sharding.RULES["batch"], "stage"), ', 'over = PartitionSpec(("stage", *sharding.RULES["batch"]), '),
    _weights("value = (value.T if piece.transposed else value)", "value = (value if piece.transposed else value)"),
    _weights("begin = sum(counts[:number])", "begin = number * counts[0]"),
    _weights("place = number - fewer", "place = number"),
    _weights('matrix("mlp.gate", (*second, "core", "w_1"), 0,', 'matrix("mlp.gate", (*second, "core", "w_1"), 1,'),
    _weights('if described.tied and "lm_head.weight" not in there:', 'if "lm_head.weight" not in there:'),
    _weights("for (a, b), (lo, _) in zip(common, piece.at, strict=True)", "for (a, b), (lo, _) in zip(common, ranges, strict=True)"),
    _of_config("scaling = group._scaling() or scaling", "group._scaling()"),
    _of("rmt_tpu/cores/positions.py", f"{_MODEL}/layers/layers_test.py::test_low_frequencies_are_scaled_for_long_texts")("(kept + (1 - kept) / factor)", "(1 - kept + kept / factor)"),
    _of_config('later.positive("rope_theta", self.positive("rope_theta", 10_000.0))', 'self.positive("rope_theta", 10_000.0)'),
    _of_config('            group.only("partial_rotary_factor", 1.0, None)', '            group.only("partial_rotary_factor", 1.0, 0.5, None)'),
    _of_config("any(isinstance(one, dict) for one in value.values())", "any(isinstance(one, list) for one in value.values())"),
    _origin("self._shared = [path for path in own if own[path] == theirs.get(path)]", "self._shared = [path for path in own if path in theirs][1:]"),
    _origin("whole().reshape(chunks)[index]", "whole().swapaxes(0, 1).reshape(chunks)[index]"),
)  # fmt: skip

_OF_PAPERS = f"{_MODEL}/experiments"
_outcomes = _of("rmt_tpu/experiments/outcomes.py", f"{_OF_PAPERS}/outcomes_test.py")
_results = _of("rmt_tpu/experiments/results.py", f"{_OF_PAPERS}/outcomes_test.py")
_of_plans = (
    f"{_OF_PAPERS}/plan_test.py",
    "tests/recipes/experiment_test.py::test_an_experiment_is_shared_and_goes_on",
)
_plans = _of("rmt_tpu/experiments/plan.py", *_of_plans)
_arms = _of("rmt_tpu/experiments/trained.py", *_of_plans)
_EXPERIMENTS = (
    _outcomes("half = stats.t.ppf(0.975, count - 1)", "half = stats.norm.ppf(0.975)"),
    _outcomes("np.std(values, ddof=1) / math.sqrt(count)", "np.std(values, ddof=1)"),
    _outcomes("return abs(self.mean) > self.half", "return True"),
    _outcomes("part = (high - goal) / (high - low)", "part = 1.0"),
    _outcomes("total - counted[\"embedding\"] - counted[\"unembedding\"]", "total"),
    _outcomes("= np.log([getattr(o, x) for o in outcomes])", "= np.array([getattr(o, x) for o in outcomes])"),
    _results("flops = share * other.tokens / o.tokens * o.flops / other.flops", "flops = share * o.flops / other.flops"),
    _results("math.log(other / getattr(largest, x)) for other in base", "math.log(getattr(largest, x) / other) for other in base"),
    _plans("\"train.steps\": config.train.steps // 2}", "\"train.steps\": config.train.steps}"),
    _plans("\"train.optimizer.final_fraction\": 1.0", "\"train.optimizer.final_fraction\": 0.1"),
    _arms("steps = round(20 * 12 * base.model.num_layers * width**2 / per_step)", "steps = round(20 * 12 * base.model.num_layers * width / per_step)"),
    _arms("_sizes(matrix, _SEARCHED).items()]", "_sizes(matrix, heads).items()]"),
)  # fmt: skip

SLIPS: dict[str, tuple[Slip, ...]] = {
    "kernels": _KEY_VECTOR + _KEY_VECTOR_TPU + _KEY_VECTOR_GPU + _DEPTH + _CAUSAL,
    "residual systems": _RESIDUAL,
    "layers and schedules": _LAYERS,
    "cores": _CORES,
    "meshes": _SHARDING,
    "training and generation": _TRAINING,
    "evaluation, weights of the hub, Muon": _EVALUATION,
    "experiments": _EXPERIMENTS,
    "checkpoints, storage, data": _STORED,
    "configs": _CONFIG,
}
