"""The kernels to tune for a program, and the sizes at which it calls them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import tuned
from pallas_kernels.platform import preferring
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis.step_cost import TrainStep, trace_config
from rmt_tpu.decoder import Decoder
from rmt_tpu.estimator import Target
from rmt_tpu.estimator.ops import OPS
from rmt_tpu.estimator.spaces import Problem, problem_of


def problems_of_ops(ops: Sequence[str], target: Target) -> list[Problem]:
    """Return the kernels that the test cases of some ops call, forward and backward."""

    def trace() -> None:
        for op in ops:
            for case in OPS[op].cases():
                function, arguments, _ = case.program("training", None)
                jax.eval_shape(function, *arguments)

    return _problems(target, trace)


def problems_of_preset(step: TrainStep, target: Target) -> list[Problem]:
    """Return the kernels that a preset calls in training, for prompts and in decoding.

    The prompt is as long as the sequences of the train step.

    Raises:
      UsageError: the preset does not exist.
      MeshError: a size of the model or batch is not divisible by the size of its mesh axis.
    """
    config = step.config()

    def trace() -> None:
        trace_config(config, jax.devices()[:1])
        decoder = nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(decoder)
        cache = jax.eval_shape(lambda: decoder.empty_cache(1, step.seq_len + 1))
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
        read = lambda params, *arguments: nnx.merge(graphdef, params).prefill(*arguments)
        jax.eval_shape(read, params, shape(1, step.seq_len), shape(1), cache)
        decode = lambda params, *arguments: nnx.merge(graphdef, params).decode(*arguments)
        jax.eval_shape(decode, params, shape(1, 1), cache)

    return _problems(target, trace)


def _problems(target: Target, trace: Callable[[], None]) -> list[Problem]:
    with lowering_for(target.kind), tuned.collecting() as looks:
        # On GPUs, a program uses kernels only on request.
        if target.platform == "cuda":
            with preferring("pallas"):
                trace()
        else:
            trace()
    return list(dict.fromkeys(problem_of(look) for look in looks))
