"""The actor-critic: one backbone in the roles of policy, reference and critic."""
