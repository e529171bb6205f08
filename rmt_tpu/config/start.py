"""Comparison of two models: a new one, and the one whose weights it starts from."""

from rmt_tpu.config import overrides
from rmt_tpu.config.mixers import Sum
from rmt_tpu.config.model import ModelConfig
from rmt_tpu.config.plain_start import PlainStart

# Fields that `_differences` does not compare. The mixer and the store are compared separately. The
# other fields do not change the function that a model computes. They change only rounding, memory
# use, speed or the initial values of weights.
_OTHERS = ("mixer", "store", "compute_dtype", "remat", "kernels", "init_std")


def is_same_model(model: ModelConfig, source: ModelConfig) -> bool:
    """Return whether the models of two configs compute the same function, given equal weights."""
    return (
        not _differences(model, source)
        and model.mixer == source.mixer
        and _residual(model) == _residual(source)
    )


def start_from(model: ModelConfig, source: ModelConfig) -> PlainStart:
    """Return whether a new model that starts with the weights of `source` equals that model.

    Two models are equal if they compute the same function. Weights that only the new model has are
    at their initial values.
    """
    if different := _differences(model, source):
        return PlainStart(None, "; ".join(different[:3]))
    store = model.store.plain_start(source.store)
    if not store.same:
        return store
    if _residual(model) != _residual(source):
        return PlainStart(False, "the residual has a different shape")
    if model.mixer == source.mixer:
        return PlainStart(True, "the config is the same")
    if not isinstance(source.mixer, Sum):
        what = f"the mixer is {source.mixer.kind} there and {model.mixer.kind} here"
        return PlainStart(None, f"{what}, and the weights of {source.mixer.kind} may be trained")
    return model.mixer.plain_start(model)


def _differences(model: ModelConfig, source: ModelConfig) -> list[str]:
    values = [overrides.to_json(m, short=False) for m in (source, model)]
    kept = ({k: v for k, v in m.items() if k not in _OTHERS} for m in values)
    return overrides.differences(*kept, "model")


def _residual(model: ModelConfig) -> tuple:
    return model.store.kind, model.residual_shape, model.data_shape
