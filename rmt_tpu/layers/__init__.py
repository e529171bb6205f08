"""Sublayers as plain functions from what they read to what they write, unaware of the residual."""
