"""Models as Keras users write them, trained in each mode and compared: python -m tests.models."""
