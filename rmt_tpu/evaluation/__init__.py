"""Evaluation of models: lm-evaluation-harness tasks, and perplexity on texts.

A request asks for the log-probability of a continuation after a context; contexts and continuations
are sequences of tokens. `documents` turns tasks (defined in `tasks`) and texts into requests, and a
`Scorer` answers them. `evaluate` sends the requests and stores the answers, `metrics` computes
results from the answers, and `report` writes the results to files.
"""
