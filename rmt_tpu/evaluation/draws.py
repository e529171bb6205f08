"""Conversion of lm-evaluation-harness's `gen_kwargs` to `Sampling` settings."""

from collections.abc import Mapping
from typing import Any

from rmt_tpu.errors import UsageError
from rmt_tpu.generation import Sampling

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
# Arguments that are used in addition to SAMPLED, and arguments that are not supported, with the
# value that has no effect.
_READ = {"until", "max_gen_toks", "do_sample"}
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "length_penalty": 1.0}


def request_sampling(arguments: Mapping[str, Any], ordinal: int) -> Sampling:
    """Return the sampling settings for a request's text.

    Args:
      arguments: the request's arguments, as normalized by lm-evaluation-harness.
      ordinal: the number of the request. It is added to the seed, so that repeated requests give
        different texts.

    Raises:
      UsageError: an argument is not legal; the message gives its name, its value and the legal
        values.
    """
    settings = {name: arguments[name] for name in SAMPLED if arguments.get(name) is not None}
    seed = settings.pop("seed", 0)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise UsageError(f"gen_kwargs: seed={seed} must be a whole number from 0 to {2**32 - 1}")
    samples = arguments.get("do_sample")
    default = 1.0 if samples else 0.0
    settings["temperature"] = (
        0.0 if samples is False else float(settings.get("temperature", default))
    )
    seed = (seed + ordinal) % 2**32
    try:
        return Sampling(max_tokens=arguments["max_gen_toks"], seed=seed, **settings)
    except UsageError as error:
        raise UsageError(str(error).replace("Sampling.", "gen_kwargs: ")) from None


def unsupported_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a request's `gen_kwargs` that are not supported.

    Arguments that are None or have a value without effect, such as num_beams=1, are left out.
    """
    supported = _READ | {*SAMPLED}
    return {
        name: value
        for name, value in arguments.items()
        if name not in supported and value is not None and _NEUTRAL.get(name) != value
    }
