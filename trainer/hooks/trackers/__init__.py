"""Experiment trackers: writers for MLflow and for Weights & Biases, which only the chief has.

`trainer/hooks/tracking.py` loads them by their names in the config, and calls them on a thread of
their own. Settings come from each tracker's own environment variables, such as MLFLOW_TRACKING_URI.
"""
