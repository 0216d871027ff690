"""What happens every N steps: report, evaluate, save, export, profile.

`base.py` has the `Hook` interface: read it first. `writers.py` is where reports go; the other files
have the hooks. `building.py` decides which task gets which hooks.
"""
