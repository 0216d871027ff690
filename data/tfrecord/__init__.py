"""TFRecord files: their names, their framing and checksums, an index of byte offsets, and damage.

`split.py` opens the shards of a split and keeps their index. `framing.py` and `crc.py` know the
format of a file. `pieces.py` finds records by the index, and `byte_ranges.py` reads them.
`fixed_layout.py` slices values out of records that all have the same layout, and `damage.py` finds
records that cannot be read. `shard_copies.py` keeps local copies of shards at s3://. Read
`split.py` first.
"""
