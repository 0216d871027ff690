"""Turns the memory optimizer of TensorFlow's graphs off.

It assumes that every device has 256 MB. In a graph that needs more, it replaces a sum of large
tensors by additions to a temporary variable: the sum depends on timing, and a loop on a server
fails (AlreadyExistsError). On CPUs the optimizer has no other effect. Seen with TensorFlow 2.21,
where `tf.config.optimizer.set_experimental_options` does not know this option. Can be replaced by
that function when it does.
"""


def turn_memory_optimizer_off() -> None:
    """Must be called before anything uses TensorFlow's context."""
    # Here, because this module is imported before TensorFlow.
    from tensorflow.core.protobuf.config_pb2 import ConfigProto
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
    from tensorflow.python.eager import context

    config = ConfigProto()
    config.graph_options.rewrite_options.memory_optimization = RewriterConfig.NO_MEM_OPT
    context.context()._config = config
