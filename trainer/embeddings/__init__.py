"""Embedding tables that are split over all parameter servers: only rows of a batch are sent.

`layer.py` has the Keras layer, ShardedEmbedding: read it first. `table.py` has its variables,
`optimizers.py` the sparse optimizers, `saved.py` the files of a checkpoint. `model_tables.py` is
what the core calls, which does not import this folder. docs/embeddings.md explains their use.
"""

from trainer.embeddings.layer import ShardedEmbedding as ShardedEmbedding
from trainer.embeddings.optimizers import FTRL as FTRL
from trainer.embeddings.optimizers import SGD as SGD
from trainer.embeddings.optimizers import Adagrad as Adagrad
from trainer.embeddings.optimizers import LazyAdam as LazyAdam
from trainer.embeddings.optimizers import RowWiseAdagrad as RowWiseAdagrad
