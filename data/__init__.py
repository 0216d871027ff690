"""Bytes to batches: TFRecord shards on disk, the global order over them, and tf.data pipelines."""
