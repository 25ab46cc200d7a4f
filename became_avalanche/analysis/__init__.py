"""Analyses of finished trainings, which may look at data of all tasks."""
