"""Low-rank gradients for any trainer: a callback, an optimizer, a monitor of weight trajectories."""
