"""Training: the loss, the optimizer, the jitted train step, and the loop that runs it."""
