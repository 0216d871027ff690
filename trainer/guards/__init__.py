"""Protects a run: signals, a watchdog, and what tasks compare of their code and settings.

`signals.py` turns SIGTERM, Ctrl-C and SIGHUP into a request to stop and save: read it first.
`watchdog.py` ends a stalled task. `fingerprint.py` has the code, the versions and the config that
must be equal in all tasks. `run_lock.py` keeps two runs from training in one directory.
"""
