"""`python -m trainer.doctor`, with the flags of the trainer: what would happen, and what is wrong.

`plan.py` says what this task would do and needs. `exchange.py` measures the network between the
tasks that run this command at the same time, and exchanges their reports. `findings.py` compares
the reports. `table.py` prints. Read `findings.py` first.
"""
