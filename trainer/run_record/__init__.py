"""What a run leaves behind: how the other commands find it and read it.

`tools.py` is the frame of the commands that read runs. ../run_files.py has the names of the files.
"""
