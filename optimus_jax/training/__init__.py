"""What trains: state, objective, loss, gradients, optimizer, step, trainer."""
