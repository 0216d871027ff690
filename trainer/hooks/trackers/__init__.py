"""Experiment trackers: writers for MLflow, for Weights & Biases, and of a user's code.

`background.py` keeps a tracker that fails or hangs away from training: read it first. `names.py`
checks the names in a config, and `building.py` makes the writers. Only the chief has trackers.
Settings come from each tracker's own environment variables, such as MLFLOW_TRACKING_URI.
"""
