"""The config of a mixture of texts, and its form on the command line."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rmt_tpu.config.checks import Checked, Share
from rmt_tpu.errors import UsageError, shown

SHARE_UNITS = 10_000  # each share is a multiple of 1 / SHARE_UNITS

_LIKE = "'gs://BUCKET/web=0.7,runs/books=0.3'"


@dataclass(frozen=True)
class MixtureSource(Checked):
    """One text of a mixture.

    Attributes:
      source: the text, in any form that `DataConfig.source` accepts.
      share: the fraction of the training tokens that come from this text, a multiple of 0.0001. A
        text with the share 0 is only used to measure the loss on its held-out part. If a share
        changes, training continues where it stopped reading the text.
    """

    source: str
    share: Share

    @property
    def units(self) -> int:
        """The share as a number of ten-thousandths."""
        return round(self.share * SHARE_UNITS)


def check_mixture(mixture: tuple[MixtureSource, ...]) -> None:
    """Check that the shares are exact and add up to 1, and that no source is repeated.

    Raises:
      UsageError: a share is not exact, the sum is not 1, or a source is repeated; the message
        begins with `data.mixture`.
    """
    where = f"data.mixture={shown(','.join(f'{m.source}={m.share:g}' for m in mixture))}"
    for each in mixture:
        if not each.source.strip():
            raise UsageError(f"{where} has a source without a name; legal: a list like {_LIKE}")
        if abs(each.share * SHARE_UNITS - each.units) > 1e-6:
            raise UsageError(
                f"{where}: the share {each.share} of {each.source} is not exact; legal: multiples "
                f"of {1 / SHARE_UNITS}"
            )
    if mixture and (total := sum(each.units for each in mixture)) != SHARE_UNITS:
        raise UsageError(
            f"{where}: the shares add up to {total / SHARE_UNITS:g}; legal: shares whose sum is 1"
        )
    for source, count in Counter(each.source for each in mixture).items():
        if count > 1:
            raise UsageError(f"{where} names {source} {count} times; legal: each source once")


def parse_mixture(text: str) -> list[dict[str, Any]]:
    """Convert a mixture from the command line, `SOURCE=SHARE,SOURCE=SHARE`, to JSON.

    The name of a source may contain commas and equals signs.

    Raises:
      UsageError: a source has no share; the message begins with `data.mixture`.
    """
    found, name = [], ""
    for piece in text.split(",") if text.strip() else []:
        name += f",{piece}" if name else piece
        source, equals, share = name.rpartition("=")
        try:
            share = float(share) if equals else None
        except ValueError:
            share = None
        if share is not None:
            found.append({"source": source.strip(), "share": share})
            name = ""
    if name:
        raise UsageError(
            f"data.mixture={shown(text)}: {name.strip()!r} has no share; legal: a list like {_LIKE}"
        )
    return found
