"""What to train: each file is a complete plug-in (see trainer/config.py)."""
