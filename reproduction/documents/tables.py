"""RESULTS.md."""


def write_tables(records: object) -> None:
    """Later."""
