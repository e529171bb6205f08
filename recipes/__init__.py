"""The recipes: one absl program per job, run with `python -m recipes.NAME --flags`.

A recipe turns its flags into a config or arguments, and calls a function of `rmt_tpu` with them.
"""
