"""The recipes: one absl program per job, run with `python -m recipes.NAME --flags`.

A recipe builds a config from its flags and passes the config to a function of `rmt_tpu`.
"""
