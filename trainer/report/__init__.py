"""`python -m trainer.report RUN`: where the time of a run went, and a page that shows the run.

`series.py` reads the reports, `examples.py` runs the model on the evaluation split, `drawing.py`
makes plots, and `page.py` puts all together with the template `page.html`. Read `page.py` first;
`goodput.py` of ../run_record/ adds up the time of all tasks.
"""
