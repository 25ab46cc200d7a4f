"""Analyses of trained models. They may use data of all tasks."""
