"""What to train: each file is a user's whole plug-in (see trainer/config.py)."""
