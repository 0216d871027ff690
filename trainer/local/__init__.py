"""A cluster on this machine: starts, watches, restarts and ends its processes.

`supervisor.py` starts one process for each task; `deaths.py` decides what follows when one ends,
and limits restarts; `policy.py` and `elastic.py` say which tasks run. `fork_server.py` makes starts
fast, and the other files watch or isolate the processes. No file here imports TensorFlow. Read
`supervisor.py` first, then `deaths.py`.
"""
