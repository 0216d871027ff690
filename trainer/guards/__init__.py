"""Protects a run: signals, a watchdog, and a comparison of the tasks' code and settings.

`signals.py` turns SIGTERM, Ctrl-C and SIGHUP into a request to stop and save: read it first.
`watchdog.py` ends a stalled task. `fingerprint.py` finds tasks with different code, versions or
configs. `run_lock.py` keeps two runs from training in one directory.
"""
