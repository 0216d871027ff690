"""The parts of a training step: losses, metrics, schedules, optimizers, precision.

Each file is one part with its formula and source. `options.py` declares the fields of the config:
read it first. The learner (trainer/learner) puts the parts together in one fixed order.
"""
