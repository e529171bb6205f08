"""Evaluation of a model: tasks of lm-evaluation-harness, and perplexity of texts.

A `Scorer` answers requests in tokens; `documents` makes the requests from tasks (`tasks`) and
texts; `evaluate` asks them and keeps the answers; `metrics` computes results from the answers;
`report` writes the results.
"""
