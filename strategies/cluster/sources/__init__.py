"""The cluster from the environment that a scheduler gives to a task, or from a list of hosts.

    found = find("auto", os.environ, Wanted("multiworker"))     # None: no scheduler's environment
    found.cluster, found.line()

`finding.py` has the schedulers, and chooses one. `hosts.py` is for --hosts. Both open no
connection. `base.py` has what they share: which of the tasks are parameter servers, and the ports.
"""
