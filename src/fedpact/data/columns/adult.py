"""UCI Adult (census income): two tables without a header, as adult.names describes them.

Nothing is done to their columns here: what stands for words, gaps and wide numbers is declared in a
plan's [records], as for a table of one's own; adult.toml beside this file has it.
"""

from fedpact.data.files import SOURCES, read_verified
from fedpact.data.form import RecordForm
from fedpact.data.tables import Table, table_of

CLASSES = ("<=50K", ">50K")

_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
# How many people of the state a row stands for; and the years of education beside its name.
_LEFT_OUT = ("fnlwgt", "education")


def adult_tables(form: RecordForm) -> tuple[Table, Table]:
    """Return the 32,561 records to train on and the 16,281 to test.

    form: which columns are features. Raises DataError: no such column, or see read_verified.
    """
    source = SOURCES["adult"]
    train, test = (
        _table(read_verified(source, file).decode("ascii"), form) for file in source.files
    )
    return train, test


def _table(text: str, form: RecordForm) -> Table:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    cells = zip(*(row for row in rows if len(row) == len(_COLUMNS)), strict=True)
    columns = dict(zip(_COLUMNS, cells, strict=True))
    # The labels of the test records end with a full stop.
    columns["income"] = tuple(label.removesuffix(".") for label in columns["income"])
    kept = {name: values for name, values in columns.items() if name not in _LEFT_OUT}
    # To drop what is left out anyway is no mistake.
    form = form.model_copy(update={"drop": [name for name in form.drop if name not in _LEFT_OUT]})
    return table_of("data set adult", kept, "income", None, form=form)
