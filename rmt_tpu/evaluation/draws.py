"""Conversion of lm-evaluation-harness's `gen_kwargs` to `Sampling` settings."""

from collections.abc import Mapping
from typing import Any

from rmt_tpu.errors import UsageError
from rmt_tpu.generation import Sampling

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
# Names of arguments that are used in addition to SAMPLED.
_READ = ("until", "max_gen_toks", "do_sample")
# Unsupported arguments. Each of them may only have the value given here, which has no effect.
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "length_penalty": 1.0}


def request_sampling(arguments: Mapping[str, Any], ordinal: int) -> Sampling:
    """Return the sampling settings for generating the text of a request.

    Args:
      arguments: the request's arguments, as normalized by lm-evaluation-harness.
      ordinal: the number of the request. It is added to the seed, so that repeated requests get
        different texts.

    Raises:
      UsageError: an argument is unknown or has an illegal value.
    """
    for name, value in arguments.items():
        known = name in _READ or name in SAMPLED
        if not known and value is not None and _NEUTRAL.get(name) != value:
            only = f"{_NEUTRAL[name]}" if name in _NEUTRAL else ", ".join([*_READ, *SAMPLED])
            raise UsageError(f"gen_kwargs: {name}={value} is not supported; legal: {only}")
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
    except UsageError as setting_and_reason:
        # The message begins with the name of the setting, like "Sampling.top_p=2".
        raise UsageError(str(setting_and_reason).replace("Sampling.", "gen_kwargs: ")) from None
