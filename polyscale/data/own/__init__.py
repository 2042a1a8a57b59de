"""A user's own data: tables, folders and Hugging Face datasets as tasks.

Reading never executes code: nothing is unpickled, and datasets have no scripts.
"""
