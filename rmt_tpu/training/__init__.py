"""Training: loss, optimizer, the jitted step, and the loop around it."""
