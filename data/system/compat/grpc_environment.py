"""Settings of gRPC inside TensorFlow, which TensorFlow reads from the environment.

    set_grpc_environment()          # before TensorFlow is imported

Seen with TensorFlow 2.21 (`grpc_channel.cc`, `grpc_state.cc`). Both variables are undocumented. Can
be deleted when TensorFlow waits for tasks, and connects them without a proxy, by default.
"""

import os

_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"  # name=value,name=value
_USES_PROXY = "grpc.enable_http_proxy"


def set_grpc_environment() -> None:
    """Makes calls wait for tasks that are not up yet, and connect to them without a proxy.

    gRPC would use the proxy of grpc_proxy, https_proxy or http_proxy, which cannot reach the tasks.
    Downloads still use it. Values of the user take precedence.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    options = os.environ.get(_OPTIONS, "")
    if _USES_PROXY not in options:
        os.environ[_OPTIONS] = ",".join(filter(None, [options, f"{_USES_PROXY}=0"]))
