"""Tables in a terminal, however narrow it is: no figure in them is cut."""

from rich.console import Console
from rich.table import Table


def print_table(console: Console, table: Table) -> None:
    """Print a table; where its longest words do not fit, as wide as it is: the terminal breaks it.

    Rich would cut words to fit, and an ε that is cut short is another ε.
    """
    for column in table.columns:
        column.overflow = "fold"
    needed = console.measure(table, options=console.options.update(width=10_000))
    if needed.minimum > console.width:
        table.width = needed.maximum
    console.print(table, crop=False)
