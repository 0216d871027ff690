"""The command line: its flags, the checks of flags against each other, and the commands.

`commands.py` decides what to do: run one task, launch a local cluster, or only check. Read it
first. `flags.py` declares every flag. `flag_checks.py` turns flags and TF_CONFIG into a checked
config and cluster. `continued.py` continues a run. TensorFlow is imported as late as possible.
"""
