"""The questions of docs/tasks: checks of the answers, and solutions of ours that the checks must accept.

Neither is part of the site: whoever solves a task has its page and the other pages alone.
"""
