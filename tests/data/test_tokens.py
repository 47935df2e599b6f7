"""Cells that hold more than a number: tokens, padded with their mask, arrays and images."""

from io import BytesIO

import numpy as np
import pandas as pd
import pytest
import torch
from tests.tables import write_parquet

from fedpact.common.errors import DataError
from fedpact.data.cells import Columns
from fedpact.data.inputs import check_shape, read_declared, table_of
from fedpact.data.load import from_python, load_dataset, load_site
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm
from fedpact.data.tables import Roles, read_numbers

IDS = [[5, 3], [2, 4, 6], [7], [1, 2]]
MASK = [[1, 1], [1, 1, 0], [1], [1, 1]]
LABELS = ["a", "b", "a", "b"]
FOUR = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids")
TOKENS = LabelForm(kind="pixels")
TABLE = {"text": ["w"] * 4, "input_ids": IDS, "attention_mask": MASK, "label": LABELS}


def padded(rows, length):
    return [(row + [0] * length)[:length] for row in rows]


def of_arrays(table):
    return {**table, "input_ids": [np.array(row, np.int32) for row in table["input_ids"]]}


@pytest.mark.parametrize("make", [dict, pd.DataFrame, of_arrays])
def test_lists_of_tokens_are_padded_with_their_mask(make):
    found = from_python(make(TABLE), PlanRecords(), "label")
    assert found.features == ("input_ids", "attention_mask")
    assert found.x.dtype == torch.int64
    assert found.x[:, 0].tolist() == padded(IDS, 3)
    assert found.x[:, 1].tolist() == padded(MASK, 3)


def test_without_a_mask_every_token_of_a_list_counts():
    table = {"input_ids": IDS, "label": LABELS}
    found = from_python(table, PlanRecords(), "label").x
    assert found[:, 1].tolist() == padded([[1] * len(row) for row in IDS], 3)


def test_kinds_of_tokens_are_a_third_row():
    table = {**TABLE, "token_type_ids": [[1] * len(row) for row in IDS]}
    found = from_python(table, PlanRecords(), "label")
    assert found.features == ("input_ids", "attention_mask", "token_type_ids")
    assert found.x[:, 2].tolist() == padded(table["token_type_ids"], 3)


OWN = [[0, 3, 4], [0], [0, 5], [0, 1, 2, 3]]


def test_what_a_decoder_reads_is_a_row_with_its_own_labels():
    labels = [[3, 4, 1], [1], [5, 1], [1, 2, 3, 1]]
    table = {"input_ids": IDS, "decoder_input_ids": OWN, "label": labels}
    found = from_python(table, PlanRecords(classes=[*"01234567"]), "label", target=TOKENS)
    assert found.features == FOUR
    assert found.x[:, 3].tolist() == padded(OWN, 4)
    assert found.x[:, 1].tolist() == padded([[1] * len(row) for row in IDS], 4)
    assert int(found.x[:, 2].abs().sum()) == 0
    assert found.y.tolist() == [(row + [-100] * 4)[:4] for row in labels]


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        *(("decoder_input_ids", bad) for bad in (None, [-1], [9], "text", [0.5])),
        *(("attention_mask", bad) for bad in ([1, 1, 1], [1, 2], None, [0.5, 1])),
    ],
    ids=str,
)
def test_an_invalid_list_beside_the_tokens_leaves_its_record_out(column, bad):
    good = {"decoder_input_ids": OWN, "attention_mask": MASK}[column]
    table = {"input_ids": IDS, column: [*good[:3], bad], "label": LABELS}
    assert len(from_python(table, PlanRecords(vocabulary=8), "label").y) == 3


def test_a_sites_table_needs_no_column_that_is_filled_in(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    columns = {"input_ids": IDS, "label": LABELS, "decoder_input_ids": OWN}
    pd.DataFrame(columns).to_parquet(path)
    at = path, "label", ("a", "b"), (4, 4), "int64", RecordForm(features=[*FOUR])
    own = load_site(*at, features=FOUR)[0]
    expected = from_python(columns, PlanRecords(length=4), "label")
    assert torch.equal(own.x, expected.x)
    pd.DataFrame({"label": LABELS, "words": IDS}).to_parquet(path)
    with pytest.raises(DataError, match="Missing: input_ids"):
        load_site(*at, features=FOUR)


def test_classes_that_no_token_has_are_asked_for_by_a_line():
    with pytest.raises(DataError, match=r"classes = \[str\(k\) for k in range\(8\)\]"):
        from_python({"input_ids": IDS, "label": IDS}, PlanRecords(), "label", target=TOKENS)


def test_an_empty_list_ahead_leaves_the_others_tokens():
    table = {"input_ids": [[], *IDS], "label": ["a", *LABELS]}
    assert from_python(table, PlanRecords(), "label").x[:, 0].tolist() == padded(IDS, 3)


@pytest.mark.parametrize("cells", [[], [None], [[]], [[], None]], ids=str)
@pytest.mark.parametrize(
    ("features", "shape", "kind"),
    [(FOUR[:2], (2, 4), "int64"), ((), (3, 4), "float32")],
    ids=["tokens", "arrays"],
)
def test_a_table_opens_whatever_its_records_hold(tmp_path, cells, features, shape, kind):
    """One good record more must not be what lets a site start, or a prediction be made."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, an extra, is not installed")
    column = features[0] if features else "x"
    listed = pyarrow.array(cells, pyarrow.list_(pyarrow.int64()))
    path = write_parquet(tmp_path / "t.parquet", {column: listed, "y": ["a"] * len(cells)})
    at = path, "y", ("a", "b"), shape, kind, RecordForm()
    assert load_site(*at, features=features)[0].x.shape == (0, *shape)
    table, form = read_declared(
        {column: cells}, RecordForm(), Roles(), shape, features, labelled=False
    )
    check_shape(table, shape, features, "the run")
    assert read_numbers(table, form, kind).shape == (len(cells), *shape)
    assert not table.sieve.good.any()


def test_a_column_of_words_in_place_of_arrays_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,a\n,b\n")
    with pytest.raises(DataError, match=r"columns x: expected shape \(3,\), as in fed"):
        load_site(tmp_path / "t.csv", "y", ("a", "b"), (3,), "float32", RecordForm())


def test_pixels_of_four_bytes_are_measurements():
    image = pytest.importorskip("PIL.Image").new("I", (4, 4), 70_000)
    found = from_python({"image": [image] * 4, "label": LABELS}, PlanRecords(), "label").x
    assert (found.dtype, float(found.max())) == (torch.float32, 70_000)


@pytest.mark.parametrize("length", [2, 5])
def test_a_declared_length_pads_and_cuts(length):
    found = from_python(TABLE, PlanRecords(length=length), "label").x
    assert found[:, 0].tolist() == padded(IDS, length)
    assert found[:, 1].tolist() == padded(MASK, length)


@pytest.mark.parametrize("length", [2, 5])
def test_a_length_that_would_be_ignored_is_refused(length):
    arrays = np.array(padded(IDS, 3)), LABELS
    for table, label in (
        (arrays, None),
        ({"a": [1.0, 2], "b": [3.0, 4], "c": [5, 6], "y": LABELS[:2]}, "y"),
    ):
        assert from_python(table, PlanRecords(length=3), label).x.shape[-1] == 3
        with pytest.raises(DataError, match=rf"length = {length}, .* only lists of tokens"):
            from_python(table, PlanRecords(length=length), label)


def test_cut_texts_are_no_numbers_in_another_unit():
    sieve = from_python(TABLE, PlanRecords(length=1), "label").sieve
    assert any("is cut at 1 tokens" in told for told in sieve.paragraphs(values=False))
    assert sieve.mostly_clamped(0.05) == ""


@pytest.mark.parametrize(
    "bad", [None, [], [1.5, 2.0], [-1], [[1], [2]], ["a"], "text", [1, 9]], ids=str
)
def test_an_invalid_token_list_leaves_its_record_out(bad):
    records = PlanRecords(length=3, vocabulary=8)
    other = from_python(TABLE, records, "label")
    table = {"input_ids": [*IDS, bad], "attention_mask": [*MASK, [1]], "label": [*LABELS, "a"]}
    found = from_python(table, records, "label")
    # Whatever it holds, the others are what they are without it.
    assert torch.equal(found.x, other.x)
    assert torch.equal(found.y, other.y)


def test_test_records_have_the_length_of_the_others():
    other = {"input_ids": [[1] * 9, [2]], "label": ["a", "b"]}
    found = from_python(TABLE, PlanRecords(), "label", test=other)
    assert found.x_test.shape == (2, 2, 3)


def test_a_file_of_a_site_is_read_like_a_table(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "records.parquet"
    pd.DataFrame(TABLE).drop(columns="text").to_parquet(path)
    whole = load_dataset(str(path), "label", form=RecordForm(length=4))
    for features in ((), whole.features):
        form = RecordForm(features=[*features] or None)
        own = load_site(path, "label", ("a", "b"), (2, 4), "int64", form, features=features)[0]
        assert torch.equal(own.x, whole.x)
        assert own.y.tolist() == whole.y.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match=r"shape \(2, 4\): expected shape \(3, 4\), as in fed"):
        load_site(path, "label", ("a", "b"), (3, 4), "int64", RecordForm())[0]


def test_each_token_has_a_label_and_padding_none():
    tags = [[0, 1], [1, -100, 1], [0], [1, 0]]
    found = from_python({**TABLE, "label": tags}, PlanRecords(), "label", target=TOKENS)
    # The mask of the second record hides its last token.
    assert found.y.tolist() == [[0, 1, -100], [1, -100, -100], [0, -100, -100], [1, 0, -100]]
    assert found.classes == ("0", "1")


def test_the_label_of_a_token_may_be_the_next_one():
    form = PlanRecords(vocabulary=8, length=3)
    found = from_python({"input_ids": IDS}, form, "input_ids", target=TOKENS)
    # The third record has no second token.
    assert found.x[:, 0].tolist() == padded([IDS[0], IDS[1], IDS[3]], 3)
    assert found.y.tolist() == [[3, -100, -100], [4, 6, -100], [2, -100, -100]]
    assert len(found.classes) == 8
    with pytest.raises(DataError, match=r"records\.vocabulary"):
        from_python({"input_ids": IDS}, PlanRecords(), "input_ids", target=TOKENS)


def test_a_record_whose_labels_are_no_list_is_left_out():
    tags = [[0, 1], "text", [0], [1, 0]]
    found = from_python({**TABLE, "label": tags}, PlanRecords(), "label", target=TOKENS)
    assert len(found.y) == 3


BAD = [
    None,
    b"no image",
    {"bytes": b"no image", "path": None},
    [[1], [2, 3]],
    [[[0.5]]],
    "text",
    np.full((3, 4, 3), "text"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:9])
@pytest.mark.parametrize("kind", ["images", "arrays"])
def test_invalid_arrays_and_images_in_a_file_are_left_out(tmp_path, kind, bad):
    """At a site no such record stops anything, whatever is in its cell."""
    pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 4, 3, 3), dtype=np.uint8)
    cells = [one.transpose(2, 0, 1).tolist() for one in pixels]
    if kind == "images":
        for j, one in enumerate(pixels):
            image.fromarray(one).save(file := BytesIO(), "png")
            cells[j] = {"bytes": file.getvalue(), "path": None}
    columns = {"x": [*cells, bad], "y": [*"ababa", "b"]}
    form = RecordForm(target=LabelForm())
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    found = table_of("here", Columns(columns), Roles("y"), form, shape=(3, 4, 3))
    assert found.sieve.good.tolist() == [True] * 5 + [False]
    assert torch.equal(torch.from_numpy(found.x[:5]).float(), expected)
    path = tmp_path / "r.parquet"
    pd.DataFrame({"x": cells[:5], "y": [*"ababa"]}).to_parquet(path)
    assert torch.equal(load_dataset(str(path), "y").x, expected)
    own = load_site(path, "y", ("a", "b"), (3, 4, 3), "float32", form)[0]
    assert torch.equal(own.x, expected)


@pytest.mark.parametrize("mode", ["1", "P", "L", "RGB"])
def test_an_image_is_its_colours_however_it_is_stored(mode):
    """Of a palette of two colours, and of black and white, too."""
    image = pytest.importorskip("PIL.Image")
    colours = np.zeros((4, 4, 3), np.uint8)
    colours[1:, 2:] = 255 if mode in "1L" else (255, 128, 3)
    of = image.fromarray(colours)
    of = of.quantize(2) if mode == "P" else of.convert(mode)
    of.save(file := BytesIO(), "png")
    expected = colours.transpose(2, 0, 1)[: 1 if mode in "1L" else 3]
    for cell in (of, {"bytes": file.getvalue(), "path": None}):
        found = from_python({"x": [cell] * 4, "y": LABELS}, PlanRecords(), "y").x
        assert found[0].tolist() == expected.tolist()


NEXT = LabelForm(kind="pixels", next=True)


@pytest.mark.parametrize("name", ["label", "input_ids"])
def test_next_tokens_are_read_from_the_tokens_themselves(name):
    """Of a column of labels, of the tokens, and of arrays with their mask."""
    ids = [[5, 3], [2, 4, 6], [7, 1]]
    table = {"input_ids": ids, "label": [[-100, 3], *ids[1:]]}
    found = from_python(table, PlanRecords(vocabulary=8), name, target=NEXT)
    assert found.y.tolist() == [[3, -100, -100], [4, 6, -100], [1, -100, -100]]
    arrays = found.x.numpy(), found.x[:, 0].numpy()
    again = from_python(arrays, PlanRecords(vocabulary=8), target=NEXT)
    assert again.y.tolist() == found.y.tolist()
    assert again.next


def test_a_record_without_any_labelled_token_is_left_out():
    """With the next token as label, also one that has a single token."""
    table = {"input_ids": IDS, "label": [[1, 0], [-100] * 3, [1], [0, 1]]}
    assert len(from_python(table, PlanRecords(), "label", target=TOKENS).y) == 3
    table["label"] = IDS
    assert len(from_python(table, PlanRecords(vocabulary=8), "label", target=NEXT).y) == 3
    cut = PlanRecords(vocabulary=8, length=1)
    with pytest.raises(DataError, match=r"if records\.length cuts them away"):
        from_python(table, cut, "label", target=NEXT)


@pytest.mark.parametrize("labels", [[0], [0, 1, 0, 1], [0, 1, 0, 1, 1]], ids=len)
def test_as_many_labels_as_tokens_are_asked_for(labels):
    """Or as many as the padded record has, or two, the ends of a span."""
    table = {"input_ids": [[5, 3, 2], [2, 4, 6, 1]], "label": [labels, [1, 1, 0, 0]]}
    found = from_python(table, PlanRecords(most_left_out=1.0), "label", target=TOKENS)
    assert len(found.y) == (2 if len(labels) == 4 else 1)


def test_a_table_has_lists_of_several_labels():
    table = {"a": [0.1, 0.2, 0.3, 0.4], "label": [[0, 1], [1, 1], [1, 0], [0, 0]]}
    found = from_python(table, PlanRecords(), "label", target=LabelForm(kind="several"))
    assert found.y.tolist() == table["label"]
    table["label"] = [[0, 1], [1], [1, 0], None]
    assert len(from_python(table, PlanRecords(), "label", target=LabelForm(kind="several")).y) == 2
    table["label"] = [0, 1, 1, 0]
    with pytest.raises(DataError, match="'multi_label'"):
        from_python(table, PlanRecords(), "label", target=LabelForm(kind="several"))


def test_no_class_is_called_minus_a_hundred():
    table = {"a": [0.1, 0.2, 0.3], "label": [0, 1, -100]}
    with pytest.raises(DataError, match="a label is -100, which means none in torch"):
        from_python(table, PlanRecords(), "label")


def test_labels_of_the_next_token_are_the_tokens():
    """Not those that are shifted already, nor tags."""
    ids = [[5, 3, 2], [2, 4, 6]]
    for labels in ([[*row[1:], -100] for row in ids], [[0] * 3] * 2):
        table = {"input_ids": ids, "label": labels}
        with pytest.raises(DataError, match="differs from the record's tokens"):
            from_python(table, PlanRecords(vocabulary=8), "label", target=NEXT)


def test_a_text_padded_in_front_is_not_cut_to_its_padding():
    table = {**TABLE, "input_ids": [[0, 0, 5, 3], *IDS[1:]]}
    table["attention_mask"] = [[0, 0, 1, 1], *MASK[1:]]
    assert len(from_python(table, PlanRecords(length=2), "label").y) == 3
    assert len(from_python(table, PlanRecords(length=3), "label").y) == 4


@pytest.mark.parametrize("classes", [2, 5])
def test_two_labels_are_a_span_of_as_many_classes_as_places(classes):
    table = {"input_ids": [[1, 2, 3, 4, 5]] * 2, "label": [[0, 1], [1, 1]]}
    records = PlanRecords(classes=[str(k) for k in range(classes)])
    if classes == 5:
        found = from_python(table, records, "label", target=TOKENS)
        assert found.y[:, :3].tolist() == [[0, 1, -100], [1, 1, -100]]
        return
    with pytest.raises(DataError, match="has another number of labels"):
        from_python(table, records, "label", target=TOKENS)


def test_sites_are_named_as_persons_are():
    """By Unicode normalisation, without characters that are not seen, and 1.0 as 1."""
    names = ["\u00c9", "E\u0301", "\u00c9\u200b", "1", "1.0"]
    table = {"a": [0.1, 0.2, 0.3, 0.4, 0.5], "label": [0, 1, 0, 1, 0], "site": names}
    found = from_python(table, PlanRecords(), "label", "site")
    assert found.site == ("\u00c9",) * 3 + ("1",) * 2


def test_text_in_such_a_column_is_not_a_token_list():
    with pytest.raises(DataError, match="input_ids"):
        from_python({"input_ids": ["1 2", "3 4"], "label": ["a", "b"]}, PlanRecords(), "label")
