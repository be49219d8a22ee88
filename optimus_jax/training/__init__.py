"""The training state, objective, loss, gradients, optimizer, step and trainer."""
