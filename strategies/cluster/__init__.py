"""The cluster: its tasks, their addresses, and which of them answer.

`tf_config.py` parses and checks `TF_CONFIG` and the host flags. `sources/` takes the cluster from a
scheduler's environment. `peers.py` identifies other tasks and waits for them; `watching.py` watches
them in training. In `rendezvous.py` the workers of multiworker meet before TensorFlow connects
them. `ports.py` finds and holds ports of this machine; `gpus.py` divides its GPUs. Only these
modules open connections. Read `tf_config.py` first.
"""
