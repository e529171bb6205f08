"""Sublayers written as functions from input to output, independent of the kind of residual."""
