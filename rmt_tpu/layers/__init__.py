"""Sublayers: plain functions from what they read to what they write. None knows the residual."""
