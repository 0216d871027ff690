"""`python -m data.prepare NAME`: writes a data set as TFRecord shards.

`sources/` has one file for each input format, and `catalog.py` the list of them. A source describes
its splits and yields serialized examples; `writing.py` writes them to shards in several processes.
Output is the same bytes for the same input. Read `sources/__init__.py` first.
"""
