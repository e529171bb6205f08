"""Schedules of the loop over layers, which differ in what they keep for the backward pass."""
