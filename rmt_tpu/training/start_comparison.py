"""The comparison of a new model with the trained model whose weights it starts from.

A run may take over a model's weights and replace its residual. For example, attention over depth
may replace the standard sum of outputs. The configs of mixers and stores state whether such a model
starts as the same function (`config.start_from`). Before the first step this module measures it:
both models compute the logits of the first texts of the first batch, in float32 and plain JAX, and
the largest difference is printed.

If the models are stated to be the same function, the difference must be explained by rounding:

    bound = 2^-24 * 4 * S * (sqrt(F) + sqrt(S)) * largest logit

A site is a place where a sublayer or the unembedding reads the residual, and S is the number of
sites. At each site, rounding causes a relative error of about `2^-24 * (sqrt(F) + sqrt(S))` in the
value that is read. The first term is from sums of F products, where F is the largest fan-in. The
second term is from sums of up to S outputs. Both are square roots because the rounding errors have
random signs. A logit depends on this value with a power of up to 3 through attention (query, key
and value), and once more through the residual. Relative errors therefore count 4 times.

The norm's epsilon also makes a difference. A mean of n outputs is their sum divided by n, and a
norm with epsilon e normalises it like the sum with epsilon n^2 e. If the difference exceeds the
bound, it is measured again with an epsilon of 1e-30 in both models, and then must be explained by
rounding alone. Otherwise the run stops. A model with routed experts is not held to the bound,
because rounding may send a token to a different expert.

Parameters that both models share exist only once. The comparison needs additional memory for the
parameters that only the trained model has and for a chunk of logits. It also needs memory for one
text of at most 512 tokens per device; in a pipeline, for one such text per microbatch. The
comparison is skipped if a device of any process has less memory. It is also skipped if the trained
model is of a run that has deleted the checkpoint by then.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu import data, memory
from rmt_tpu.cores.experts import dropless
from rmt_tpu.decoder import Decoder
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.execution import kernels
from rmt_tpu.layers.data_vectors import concatenate
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.runs.warm_start import WarmStart
from rmt_tpu.training import memory_check
from rmt_tpu.training.global_arrays import put_batch
from rmt_tpu.training.run import PreparedRun, check_sizes, pipeline_schedule, place_parameters

# Maximum number of tokens of a text, and maximum number of logits in memory at a time per model.
_TOKENS, _LOGITS, _MIN_CHUNK = 512, 2**24, 64
# An epsilon that changes no norm in float32.
_NO_EPSILON = 1e-30


class Difference(NamedTuple):
    """The difference between two models' logits on the same tokens.

    Attributes:
      largest: the largest absolute difference of two logits.
      scale: the largest absolute logit of the trained model.
    """

    largest: float
    scale: float

    def is_within(self, bound: float) -> bool:
        """Return whether the difference is at most `bound` times the largest logit."""
        return self.largest <= bound * self.scale  # The result is False for NaN.

    def __str__(self) -> str:
        return f"differ by at most {self.largest:.2g} (the largest logit is {self.scale:.3g})"


def report(
    config: cfg.RunConfig,
    run: PreparedRun,
    warm_start: WarmStart,
    params: Any,
    windows: data.Windows | data.Mixture,
    log: Callable[[str], None],
) -> None:
    """Print whether a new model starts as the trained model, and how far its logits differ.

    All processes must call this function.

    Args:
      config: the run's config.
      run: the run's functions and shardings.
      warm_start: the trained model.
      params: the new model's parameters before the first step.
      windows: the training windows.
      log: a function that prints a line.

    Raises:
      RunError: the models are stated to be the same function, but rounding and the norm's epsilon
        do not explain the difference of their logits; or a file of the trained model is damaged.
    """
    model, source, location = config.model, warm_start.source, warm_start.location
    stated = cfg.start_from(model, source)
    line = f"the model {_STARTS[stated.same]} {location}, because {stated.reason}"
    if cfg.is_same_model(model, source) and not warm_start.new:
        log(line)
        return
    try:
        comparison = _Comparison(config, run, warm_start)
        # Processes may have different amounts of memory, but all must compare, or none.
        shortages = processes.exchange(comparison.shortage() or "", "comparing logits")
        if shortage := next(filter(None, shortages), None):
            log(f"{line}; logits are not compared: {shortage}")
            return
        source_params = warm_start.source_params(params, comparison.like)
        if source_params is None:
            log(f"{line}; logits are not compared: the run there has deleted its checkpoint by now")
            return
        difference = functools.partial(
            comparison.difference, params, source_params, comparison.batch(windows)
        )
        measured = difference()
    except sharding.MeshError as error:
        log(f"{line}; logits are not compared on this mesh: {error}")
        return
    line += f": on {comparison.tokens} tokens in float32, logits {measured}"
    bound = rounding_bound(model)
    if stated.same and not measured.is_within(bound):
        if model.cores_of_kind("experts"):
            line += "; rounding may choose other experts"
        else:
            exact = difference(_NO_EPSILON)
            if not exact.is_within(bound):
                raise RunError(
                    f"--init_from={location} with model.mixer={model.mixer.kind} should start as "
                    f"the same function, because {stated.reason}, but without the norm's epsilon "
                    f"the models' logits differ by at most {exact.largest:.2g}; rounding explains "
                    f"at most {bound * exact.scale:.2g}; this mixer or this device's matrix "
                    "products have an error; legal: another model.mixer"
                )
            line += f", all but {exact.largest:.2g} by the norm's epsilon"
    log(line)


_STARTS = {
    True: "starts as the same function as",
    False: "does not start as the same function as",
    None: "may not start as the same function as",
}


def rounding_bound(model: cfg.ModelConfig) -> float:
    """Return the largest difference that rounding explains, divided by the largest logit."""
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    fan_in = max(jax.tree.leaves(metadata(abstract, "fan_in")))
    sites = model.num_sublayers + 1
    return 2**-24 * 4 * sites * (math.sqrt(fan_in) + math.sqrt(sites))


class _Comparison:
    """The comparison of two models on a mesh, with the trained model sharded like the new one.

    Attributes:
      like: tree of the trained model's parameters as shapes, dtypes and shardings.
      tokens: the number of tokens on which the models are compared.
      left_out: the bytes on one device of the parameters that only the trained model has.

    Raises:
      MeshError: the trained model cannot be divided over the mesh.
    """

    def __init__(self, config: cfg.RunConfig, run: PreparedRun, warm_start: WarmStart):
        self._config, self._run, mesh = config, run, run.mesh
        self._models = config.model, warm_start.source
        train = dataclasses.replace(config.train, optimizer=cfg.AdamW())
        self._source_run = cfg.RunConfig(_in_float32(warm_start.source), train, config.data)
        check_sizes(self._source_run, mesh)
        self._schedule = pipeline_schedule(self._source_run, mesh)
        virtual = self._schedule.virtual if self._schedule else 1
        shapes, specs = place_parameters(warm_start.source, mesh, virtual)
        self._specs = (jax.tree.map(lambda s: s.spec, run.state_shardings.params), specs)
        self.like = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            shapes,
            specs,
        )
        flat = traverse_util.flatten_dict(self.like)
        left_out = {path: flat[path] for path in warm_start.left_out(self.like)}
        self.left_out = memory_check.bytes_per_device(
            left_out, {path: x.sharding for path, x in left_out.items()}
        )
        devices = lambda axis: math.prod(mesh.shape[name] for name in sharding.RULES[axis])
        microbatches = self._schedule.microbatches if self._schedule else 1
        # Each device that shares a sequence in a ring has two parts of the sequence, so the number
        # of parts must divide the sequence's length.
        parts = 2 * devices("tokens") if devices("tokens") > 1 else 1
        seq_len = max(parts, min(_TOKENS, config.data.seq_len) // parts * parts)
        self._shape = devices("batch") * microbatches, seq_len
        self.tokens = math.prod(self._shape)

    def shortage(self) -> str | None:
        """Return a message if a device has too little memory for the comparison; otherwise None."""
        state = memory_check.lower_bound(self._config, self._run).state
        needed = state + self.left_out + 2 * 4 * _LOGITS
        devices = self._run.mesh.local_devices
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        if limit is None:
            limit = memory.machine_bytes() // len(devices)
        if needed <= limit:
            return None
        return (
            f"that needs at least {memory.format_bytes(needed)} on each device, which has "
            f"{memory.format_bytes(limit)}"
        )

    def batch(self, windows: data.Windows | data.Mixture) -> data.Batch:
        """Return the beginnings of the first texts of the first batch, on the devices."""
        seq_len = self._shape[1]
        begin = lambda x: x[:, :seq_len]
        read = lambda rows: jax.tree.map(begin, windows.batch_at(0, rows))
        return put_batch(read, self._shape, self._run.batch_sharding)

    def difference(
        self, params: Any, source_params: Any, batch: data.Batch, epsilon: float | None = None
    ) -> Difference:
        """Return the difference between the logits of the new model and the trained model.

        Args:
          params: the new model's parameters.
          source_params: the trained model's parameters.
          batch: the tokens.
          epsilon: the epsilon of both models' norms; None keeps the epsilons of their configs.
        """
        graphs = [nnx.split(_abstract(model, epsilon), nnx.Param)[0] for model in self._models]

        def largest(params: tuple[Any, Any], batch: data.Batch) -> Float[Array, "1 two"]:
            decoders = [nnx.merge(*model) for model in zip(graphs, params, strict=True)]
            return _largest(*decoders, batch, self._schedule)[None]

        mesh, of_batch = self._run.mesh, self._run.batch_sharding.spec
        on_devices = kernels.per_device(
            largest, mesh, (self._specs, of_batch), PartitionSpec(mesh.axis_names)
        )
        compute = lambda *args: jnp.max(on_devices(*args), axis=0)
        # Override a precision that the user may have set for training, because it would make the
        # products less exact.
        with jax.default_matmul_precision("highest"):
            found = jax.jit(compute, out_shardings=sharding.replicated(mesh))(
                (params, source_params), batch
            )
        return Difference(*map(float, found))


def _in_float32(model: cfg.ModelConfig, epsilon: float | None = None) -> cfg.ModelConfig:
    """Return the config with which a model computes logits in float32 and plain JAX."""
    return dataclasses.replace(
        model,
        compute_dtype="float32",
        remat="full",
        kernels="xla",
        store=dataclasses.replace(model.store, dtype="float32"),
        norm_epsilon=model.norm_epsilon if epsilon is None else epsilon,
    )


def _abstract(model: cfg.ModelConfig, epsilon: float | None) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(dropless(_in_float32(model, epsilon)), rngs=nnx.Rngs(0)))


def _largest(
    decoder: Decoder, source: Decoder, batch: data.Batch, schedule: sharding.Schedule | None
) -> Float[Array, " two"]:
    """Return the largest difference between two models' logits, and the largest logit of `source`.

    In per-device code, the result is for this device's tokens.
    """

    def inputs_and_kernel(decoder: Decoder) -> tuple[Array, Array]:
        z, _ = decoder.features(batch.inputs, segment_ids=batch.segment_ids, schedule=schedule)
        x = concatenate(z)
        kernel = sharding.gather(decoder.unembedding.matrix, "fsdp", axis=0)
        return x.reshape(-1, x.shape[-1]), kernel

    (x, kernel), (source_x, source_kernel) = map(inputs_and_kernel, (decoder, source))
    chunk = min(len(x), max(_LOGITS // kernel.shape[1], _MIN_CHUNK))

    def of_chunk(xs: tuple[Array, Array]) -> Float[Array, " two"]:
        logits = decoder.unembedding.scaled(xs[0] @ kernel)
        expected = source.unembedding.scaled(xs[1] @ source_kernel)
        return jnp.stack([jnp.max(jnp.abs(logits - expected)), jnp.max(jnp.abs(expected))])

    chunks = lambda x: jnp.pad(x, [(0, -len(x) % chunk), (0, 0)]).reshape(-1, chunk, x.shape[1])
    return jnp.max(jax.lax.map(of_chunk, (chunks(x), chunks(source_x))), axis=0)
