"""Programs that print the measurements in README.md and docs/.

`run.py` compares this program with its peers in `peers/`. Read `run.py` first.
"""
