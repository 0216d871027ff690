"""Runs on an NVIDIA GPU, in separate processes. All are skipped on a machine without one."""
