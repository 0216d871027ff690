"""`python -m trainer.predict`: runs a model on examples of a data set or on files.

`__main__.py` has the command, `predicting.py` the loop over batches: read it first. `models.py`
loads a run, a checkpoint, a .keras file or a SavedModel, and `records.py` makes the records that
the run's `parse` reads out of files.
"""
