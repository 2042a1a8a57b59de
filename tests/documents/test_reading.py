import io
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyscale.documents import (
    Document,
    Image,
    Reading,
    read_html,
    read_json,
    read_markdown,
    read_python,
    read_table,
)
from polyscale.documents.words import split_words
from polyscale.trees import SignalTree

PAGE = """<!doctype html><title>Big &amp; small</title>
<h1>One</h1><p>It is <b>bo</b>ld&nbsp;here. See <a href="x">this page</a> now. <img src=a.png alt=A>
<h2>Empty</h2><h2>List</h2><ul><li>a<li>b <p>c</ul>
<table><tr><th>n<th></th><th>v</table><script>var hidden</script><!-- hidden -->
<h1>Two</h1>a < b <i title="x>y">text</i>"""
NOTES = """# Title

Some *emph* and `code x` [link text](http://a.b "text") snake ![alt](i.png) word!
two **lines**.

## Sec

> - item one
>   goes on

| a | b |
|---|---|
| 1 \\| 2 | *y* |

## Empty
"""
READERS = [read_html, read_markdown, read_json, read_python, read_table]


def sources(document: Document) -> list[str]:
    assert document.source is not None
    assert document.tree.source_offsets is not None
    return [document.source[a:b] for a, b in document.tree.source_offsets.tolist()]


def texts(document: Document, kind: str) -> list[str]:
    return [document.text(node) for node in document.nodes(kind)]


def test_a_page_has_its_title_sections_links_lists_tables_and_images() -> None:
    document = read_html(PAGE)
    document.tree.validate()
    assert texts(document, "title") == ["Big &amp; small"]
    assert texts(document, "heading") == ["One", "List", "Two"]
    assert texts(document, "link") == ["this page"]
    assert texts(document, "item") == ["a", "b <p>c"]
    assert texts(document, "cell") == ["n", "v"]
    assert texts(document, "sentence")[1:4] == [
        "One",
        "It is <b>bo</b>ld&nbsp;here",
        "See <a " + ('href="x">this page</a> now'),
    ]
    assert Image("a.png", "A") in document.values
    assert document.tree.modality_names == ("text", "image")
    assert "hidden" not in document.values
    sections = document.nodes("section")  # List is within One
    assert [document.tree.depth[node].item() for node in sections] == [2, 4, 2]


def test_cells_keep_their_columns_where_empty_ones_are_left_out() -> None:
    document = read_html(PAGE)
    cells = document.nodes("cell")
    assert document.tree.position[cells, 0].tolist() == [0, 2]


def test_every_leaf_of_a_page_stands_where_it_says() -> None:
    document = read_html(PAGE)
    for value, source in zip(document.values, sources(document), strict=True):
        if isinstance(value, Image):
            assert source == "<img src=a.png alt=A>"
        else:
            assert source.replace("</b>", "") == value


def test_markdown_has_what_a_page_has_and_its_leaves_their_places() -> None:
    document = read_markdown(NOTES)
    document.tree.validate()
    assert texts(document, "title") == ["Title"]
    assert texts(document, "heading") == ["Sec"]
    assert texts(document, "link") == ["link text"]
    assert texts(document, "cell") == ["a", "b", "1 \\| 2", "y"]
    assert texts(document, "item") == ["item one\n>   goes on"]
    for value, source in zip(document.values, sources(document), strict=True):
        assert source == ("![alt](i.png)" if isinstance(value, Image) else value)
    # The "text" of the link, not the one in its address.
    assert document.tree.source_offsets is not None
    row = document.values.index("text")
    assert int(document.tree.source_offsets[row, 0]) == NOTES.index("link text") + 5


def test_sections_without_content_are_kept_on_demand() -> None:
    for read, source in ((read_html, PAGE), (read_markdown, NOTES)):
        assert "Empty" not in read(source).values
        assert "Empty" in read(source, Reading(drop_empty=False)).values
    with pytest.raises(ValueError, match="pass drop_empty=False to keep sections"):
        read_markdown("## A\n\n## B")


def test_json_keeps_its_names_numbers_and_places() -> None:
    source = '{"t": "One two. Th\\u0065 \\"x\\"", "n": [1, -2.5e3, {"q": null}], "e": {}}'
    document = read_json(source)
    document.tree.validate()
    assert document.values == ["One", "two", "The", "x", 1.0, -2500.0, "null"]
    assert sources(document) == ["One", "two", "Th\\u0065", "x", "1", "-2.5e3", "null"]
    assert set(document.tree.key_names) == {"body", "t", "n", "q"}
    assert document.tree.modality_names == ("text", "number")


def has_content(value: object) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(has_content, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, str) or bool(list(split_words(value)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=60, deadline=None)
def test_what_the_json_module_writes_is_read(value: object) -> None:
    source = json.dumps(value)
    numbers: list[float] = []
    json.loads(source, parse_float=lambda n: numbers.append(float(n)))
    if not has_content(value):
        with pytest.raises(ValueError, match="must have some content"):
            read_json(source)
        return
    document = read_json(source)
    assert [v for v in document.values if isinstance(v, float)] == numbers


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "got its end at character 0"),
        ("[1,]", r"got ']' at character 3 \(line 1\), where a value is expected"),
        ("[1 2]", "where ',' or '\\]' is expected"),
        ('{"a" 1}', "where ':' is expected"),
        ("{1: 2}", "where a name in double quotes is expected"),
        ('"\\x"', "a string with valid escapes"),
        ("[} ", "got '} ' at character 1"),
        ('[1] "x"', "where the end is expected"),
    ],
)
def test_what_is_no_json_is_refused_by_its_place(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_json(source)


def test_tables_are_keyed_by_column_from_text_and_from_data() -> None:
    source = 'name,price,note\r\n"old ""house""",3.5,\r\nnew,,"a, b"\n'
    document = read_table(source)
    document.tree.validate()
    assert document.values == ["old", "house", 3.5, "new", "a", "b"]
    assert sources(document) == ["old", "house", "3.5", "new", "a", "b"]
    rows = [{"name": 'old "house"', "price": 3.5}, {"name": "new", "note": "a, b"}]
    columns = {"name": ['old "house"', "new"], "price": [3.5, None], "note": [None, "a, b"]}
    lists = [['old "house"', 3.5, None], ["new", None, "a, b"]]
    for table in (read_table(rows), read_table(columns), read_table(lists, columns=list(columns))):
        assert table.tree == document.tree
        assert table.values == document.values
    assert read_table("a\tb\n1\tx").values == [1.0, "x"]
    with pytest.raises(ValueError, match=r"row 0 of table must have 2 cells, .*, got 1"):
        read_table("a,b\n1\n")
    with pytest.raises(ValueError, match="columns must be given"):
        read_table([[1, 2]])


def test_python_has_its_functions_as_sections_and_its_tokens_as_leaves() -> None:
    source = (
        '"""Doc."""\n\nclass A:\n    # note\n    def f(self):\n        return f"{x}" + 1\n\n'
        "    async def g(): pass\n\nif x:\r\n    y = (1,\r\n  2)\n"
    )
    document = read_python(source)
    document.tree.validate()
    assert sources(document) == document.values
    assert [text.split("\n")[0] for text in texts(document, "section")] == [
        "class A:",
        "def f(self):",
        "async def g(): pass",
    ]
    assert 'f"{x}"' in document.values
    assert [v for v in document.values if v[0] == "#"] == ["# note"]


@pytest.mark.parametrize("source", ["x = (", "  x\n y", "'''abc"])
def test_what_is_no_python_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="source must be Python"):
        read_python(source)


def test_code_and_addresses_in_markdown_stand_where_their_words_are() -> None:
    document = read_markdown("A `b\nc` and <http://d.e> or <f@g.h>, `` i`j ``.")
    assert [word.replace("\n", " ") for word in sources(document)] == document.values


# Robustness


@given(
    st.lists(
        st.sampled_from(
            [
                "<p>",
                "<b",
                "</b>",
                "<a",
                'href="',
                "<!--",
                "-->",
                "<!x",
                "<table>",
                "<tr>",
                "<td>",
                "</table>",
                "<li>",
                "<title>",
                "<script>",
                "&",
                "&amp;",
                "&#0;",
                "&#xd800;",
                "<h2>",
                "<pre>",
                "</p>",
                "<img",
                "<img>",
                "<br><br>",
                "\ue000",
                "1",
                "\ue001",
                "\x00",
                "�",
                "'",
                '"',
                ">",
                "#",
                "##",
                "*",
                "_",
                "`",
                "```",
                "[",
                "](",
                "]",
                "![",
                "|",
                "|-",
                "-",
                "1.",
                "\\",
                "{",
                "}",
                ",",
                ":",
                "def",
                "\t",
                "word.",
                "؟",
                "।",
            ]
        )
        | st.sampled_from([" ", "\n", "\r\n", "\n\n", "    "])
        | st.text(max_size=3),
        max_size=40,
    ).map("".join)
)
@settings(max_examples=150, deadline=None)
def test_any_source_is_a_tree_or_a_value_error(source: str) -> None:
    for read in READERS:
        try:
            document = read(source)
        except ValueError:
            continue
        document.tree.validate()
        assert len(document.values) == document.tree.num_rows
        assert len(document.kinds) == document.tree.num_nodes
        if document.tree.source_offsets is not None:
            assert int(document.tree.source_offsets.max()) <= len(source)


@pytest.mark.parametrize(
    ("read", "source"),
    [
        (read_html, "<div>" * 10_000 + "deep"),
        (read_html, "<ul><li>" * 2_000 + "deep"),
        (read_html, "<b><i>" * 5_000 + "deep"),
        (read_markdown, ">" * 90 + " deep"),
        (read_markdown, "[" * 10_000 + " deep"),
        (read_json, "[" * 10_000 + "1" + "]" * 10_000),
        (read_json, '{"a":' * 3_000 + "1" + "}" * 3_000),
    ],
)
def test_deep_nesting_is_a_tree(read: object, source: str) -> None:
    document = read(source)  # type: ignore[operator]
    assert document.values
    assert document.tree.num_rows == len(document.values)


@pytest.mark.parametrize(
    ("read", "source"),
    [
        (read_python, "(" * 10_000),
        (read_json, "[" * 10_000),
        (read_html, '<a <a=" <!-- ' * 20_000),
        (read_html, ""),
        (read_markdown, ">" * 10_000 + " deep"),
        (read_markdown, "- " * 10_000 + "deep"),
        (read_markdown, " \n"),
        (read_table, ""),
        (read_python, ""),
    ],
)
def test_what_has_no_content_is_a_value_error(read: object, source: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ValueError, match="must"):
        read(source)  # type: ignore[operator]
    assert time.perf_counter() - begin < 10


def test_a_line_of_50_megabytes_is_read_or_refused_by_its_leaves() -> None:
    long = "x" * 50_000_000
    assert read_html(f"<p>{long}</p>").tree.num_leaves == 1
    for read, source in (
        (read_markdown, long),
        (read_json, f'"{long}"'),
        (read_table, f"a\n{long}"),
    ):
        assert read(source).tree.num_leaves == 1  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"got .* at character 0"):
        read_json(f'"{long}')
    with pytest.raises(ValueError, match="source must have at most 1,000 leaves"):
        read_html("word " * 2_000_000, Reading(max_leaves=1000))


def test_what_is_no_str_is_refused() -> None:
    for read in (read_html, read_markdown, read_json, read_python):
        with pytest.raises(TypeError, match=r"source must be .* got bytes"):
            read(b"x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="table must be CSV"):
        read_table(io.BytesIO())


# Trees


def test_the_constructors_of_signal_tree_read_the_same() -> None:
    tree, leaves = SignalTree.from_html(PAGE, return_leaves=True)
    document = read_html(PAGE)
    assert tree == document.tree
    assert leaves == document.values
    assert SignalTree.from_markdown(NOTES) == read_markdown(NOTES).tree
    assert SignalTree.from_json("[1, 2]") == read_json("[1, 2]").tree
    assert SignalTree.from_table("a\n1") == read_table("a\n1").tree
    assert SignalTree.from_python("x = 1") == read_python("x = 1").tree
    assert "Empty" in SignalTree.from_html(PAGE, drop_empty=False, return_leaves=True)[1]


def test_large_families_are_windows_and_a_warning_says_so() -> None:
    source = "".join(f"<p>{number}</p>" for number in range(3000))
    with pytest.warns(UserWarning, match="a family of 3,000 members is split into windows of 64"):
        document = read_html(source)
    document.tree.validate()
    assert int(document.tree.child_count.max()) <= 1024
    assert document.values == [str(number) for number in range(3000)]
    assert len(document.nodes("window")) == 47
    assert len(document.nodes("paragraph")) == 3000


def test_words_of_any_script_are_whole() -> None:
    def words(text: str) -> list[str]:
        return [word for _, _, word in split_words(text)]

    assert words("हिन्दी में।") == ["हिन्दी", "में"]
    assert words("it\u2019s 3.5 snake_case") == ["it\u2019s", "3", "5", "snake", "case"]
    assert words("猫がcat") == ["猫", "が", "cat"]
    assert words("مُحَمَّد؟") == ["مُحَمَّد"]
