"""Schedules of the loop over layers: what is kept for the backward pass, rebuilt, or sent on."""
