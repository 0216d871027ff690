"""Bytes to batches: which examples make up batch s, and how they are read and parsed.

`order.py` is the pure function from position to record, `features.py` parses, and `reader.py` says
what a batch is. `disk_reader.py` reads batches on this machine, `batch_feeds.py` feeds them to a
training graph, `tickets.py` describes them to other processes. `tfrecord/` has the files,
`prepare/` writes them, `inspect.py` shows them, and `id_counts.py` counts the ids in them.
`images.py` is for the `parse` of a config file. Mistakes of a user, and wrong or damaged data, are
a DataError, which says what to do; of the numbers that `order.py` gets, a ValueError.

A chunk: consecutive records that the index finds. A piece: records that are read together. A group:
batches parsed in one call. A block: groups handed to tf.data at once. Read `order.py` first, then
`reader.py`.
"""
