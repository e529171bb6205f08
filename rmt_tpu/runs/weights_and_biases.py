"""The tracker for Weights & Biases, which uses the package `wandb`.

Environment variables select where the run is shown, as for any program that uses wandb:
WANDB_PROJECT (here by default rmt_tpu), WANDB_ENTITY, WANDB_API_KEY, WANDB_DIR and WANDB_MODE,
which may be "offline".
"""

import html
import importlib.util
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rmt_tpu.storage import Folder

# At its end, a run waits at most this number of seconds for the upload of its records.
FINISH_SECONDS = 300.0


def is_installed() -> bool:
    """Return whether wandb is installed."""
    return importlib.util.find_spec("wandb") is not None


def new_id() -> str:
    """Return a unique id for a new run."""
    return uuid.uuid4().hex[:16]


class WeightsAndBiases:
    """A run that is recorded in Weights & Biases; see `trackers.Tracker`.

    The horizontal axis of all curves is the run's own step. wandb's steps must not decrease, but a
    run that resumes repeats the steps after its last checkpoint.

    Args:
      folder: the run folder. wandb keeps its files there if it is local.
      run_id: the id of the tracked run; an existing run with this id is continued.
      log: a callback that receives one line, which states where the run is shown.
    """

    def __init__(self, folder: Folder, run_id: str, log: Callable[[str], None]):
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rmt_tpu"),
            id=run_id,
            name=folder.name,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or folder.local_path,
            # The run prints its own lines, so wandb neither prints lines nor records the output.
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        log(f"wandb: {self._run.url or self._run.dir}")

    def config(self, config: Mapping[str, Any]) -> None:
        """Record the run's config."""
        self._run.config.update(dict(config), allow_val_change=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step, given as a mapping from name to value."""
        self._run.log({"step": step, **values})

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Record a picture in PNG format that shows the run after a step."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "picture.png")
            path.write_bytes(png)
            self._run.log({"step": step, name: self._wandb.Image(str(path))})

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""
        page = f"<pre>{html.escape(text)}</pre>"
        self._run.log({"step": step, name: self._wandb.Html(page)})

    def flush(self) -> None:
        """Do nothing: wandb writes in a separate process."""

    def close(self, failed: bool) -> None:
        """End the tracked run.

        Raises:
          TimeoutError: the upload takes too long; wandb's own files have all records.
        """
        finish = threading.Thread(
            target=lambda: self._run.finish(exit_code=int(failed)), name="wandb", daemon=True
        )
        finish.start()
        finish.join(FINISH_SECONDS)
        if finish.is_alive():
            raise TimeoutError(
                f"the upload to Weights & Biases did not finish within {FINISH_SECONDS:.0f} s"
            )
