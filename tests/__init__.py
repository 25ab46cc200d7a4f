import gc

gc.disable()  # until all tests are collected (conftest.py): imports make many objects and hardly any garbage
