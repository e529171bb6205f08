"""The recipes: one absl program per job, run with `python -m recipes.NAME --flags`.

A recipe turns its flags into a config or arguments, and calls a function of `rmt_tpu` with them.
"""

import sys

from recipes import interrupts

interrupts.while_importing(getattr(sys, "argv", []))
