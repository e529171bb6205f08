"""Changes to the logits of one text before a token is chosen: bias, penalties, a minimum length.

There are separate decode programs with these changes. The engine runs them only while some text
needs a change.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rmt_tpu.config.checks import Checked, Count, Range

_Additive = Annotated[float, Range("at least -2, at most 2", -2, 2)]


@dataclass(frozen=True)
class Adjustment(Checked):
    """The settings of one text that change logits, and the text's own stop tokens.

    The penalties and the bias are added after the repetition penalty and before the division by
    the temperature. Penalties count the new tokens only, not those of the prompt.

    Attributes:
      presence_penalty: the number that is subtracted from the logit of every token that the text
        already has.
      frequency_penalty: the number that is subtracted from a token's logit for each time that the
        text has the token.
      logit_bias: maps tokens to the numbers that are added to their logits.
      stop_tokens: further tokens that end the text.
      min_tokens: the minimum number of new tokens; until then, no stop token is chosen.
    """

    presence_penalty: _Additive = 0.0
    frequency_penalty: _Additive = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_tokens: tuple[int, ...] = ()
    min_tokens: Count = 0

    @property
    def changes_logits(self) -> bool:
        """Whether decode steps need the programs that change logits."""
        penalized = self.presence_penalty or self.frequency_penalty
        return bool(penalized or self.logit_bias or self.min_tokens)


class LogitChanges(NamedTuple):
    """The `Adjustment` settings of all rows as arrays, and the tokens that each row has so far.

    Attributes:
      bias: the number that is added to each logit.
      counts: how often each token occurs among the new tokens.
      late: whether a token is excluded before the position `late_until`.
      presence: the presence penalty.
      frequency: the frequency penalty.
      late_until: the first position at which all tokens may be chosen.
    """

    bias: Float[Array, "batch vocab"]
    counts: Int[Array, "batch vocab"]
    late: Bool[Array, "batch vocab"]
    presence: Float[Array, " batch"]
    frequency: Float[Array, " batch"]
    late_until: Int[Array, " batch"]


def changes_of(
    adjustment: Adjustment, ends: Collection[int], prompt_tokens: int, vocab_size: int
) -> LogitChanges:
    """Return the logit changes of one row before its first new token, as NumPy arrays.

    Args:
      adjustment: the settings.
      ends: the tokens that end every text.
      prompt_tokens: the number of tokens of the prompt.
      vocab_size: the vocabulary size of the model.
    """
    bias, late = np.zeros((1, vocab_size), np.float32), np.zeros((1, vocab_size), bool)
    for token, value in adjustment.logit_bias.items():
        bias[0, token] = value
    late[0, [t for t in (*ends, *adjustment.stop_tokens) if 0 <= t < vocab_size]] = True
    return LogitChanges(
        bias,
        np.zeros((1, vocab_size), np.int32),
        late,
        np.array([adjustment.presence_penalty], np.float32),
        np.array([adjustment.frequency_penalty], np.float32),
        np.array([prompt_tokens + adjustment.min_tokens], np.int32),
    )


def no_changes(rows: int, vocab_size: int) -> LogitChanges:
    """Return neutral logit changes for `rows` rows, which alter no logits."""
    zeros = lambda dtype, *sizes: jnp.zeros((rows, *sizes), dtype)
    return LogitChanges(
        *(zeros(dtype, vocab_size) for dtype in (jnp.float32, jnp.int32, bool)),
        *(zeros(dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)),
    )


def count_tokens(changes: LogitChanges, token: Int[Array, " batch"]) -> LogitChanges:
    """Return the logit changes after counting one more new token for each row."""
    rows = jnp.arange(len(token))
    return changes._replace(counts=changes.counts.at[rows, token].add(1))


def change_logits(
    logits: Float[Array, "batch vocab"], changes: LogitChanges, positions: Int[Array, " batch"]
) -> Float[Array, "batch vocab"]:
    """Apply the changes of all rows to their logits.

    Args:
      logits: the logits after the repetition penalty.
      changes: the changes.
      positions: the position of the token that is chosen.
    """
    present = changes.counts > 0
    logits = logits - changes.presence[:, None] * present
    logits = logits - changes.frequency[:, None] * changes.counts + changes.bias
    early = positions < changes.late_until
    return jnp.where(changes.late & early[:, None], -jnp.inf, logits)
