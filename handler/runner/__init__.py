"""The runner: the process that owns the model. Must not know HTTP, the APIs or the environment."""
