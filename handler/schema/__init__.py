"""Request and response models of each API. Must not know the model or the runner."""
