"""The report: JSON, the table that people read, and an `emit` that never gets in the way."""

import importlib.util
import io
import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

import ascend_ln_fuse.report as report_module
from ascend_ln_fuse.report import (
    FusionReport,
    SiteReport,
    clear_reports,
    emit,
    last_reports,
    record,
    render,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    clear_reports()
    yield
    clear_reports()


def fused(where="norm, m.py:3", **more):
    given = {"kernels_removed": ("layer_norm",), "bytes_before": 40 * MIB, "bytes_after": 20 * MIB}
    return SiteReport("fused", "norm", where, **{**given, **more})


def declined(where="ln_post, m.py:9", reason="the last size is symbolic", **more):
    return SiteReport("declined", "norm", where, reason, **more)


def call_of(source, name="aln_kernel"):
    """What a site keeps to make its kernel from: here one with the source that `source()` gives."""
    return SimpleNamespace(source=source, kernel=lambda: SimpleNamespace(name=name))


def dit(layers=28):
    """Six sites a layer, two of them with the same region, one declined."""
    sites = []
    for i in range(layers):
        long = "the packed qkv is written in place by `mul_` between the view and the norm, " * 3
        adaln = ("layer_norm", "add", "mul", "add")
        sites += [
            fused(f"blocks.{i}.norm1, dit.py:52", kernels_removed=adaln, node=f"n{i}"),
            fused(f"blocks.{i}.attn.norm_q, dit.py:41", region="q", hidden_kernels=("Slice",)),
            fused(f"blocks.{i}.attn.norm_k, dit.py:42", region="q", hidden_kernels=("Slice",)),
            fused(f"blocks.{i}.norm2, dit.py:60", hidden_kernels=("Fill", "Fill"), symbolic=True),
            declined(f"blocks.{i}.cross.norm_q, dit.py:77", long, node="mul__12"),
            fused(
                f"blocks.{i}.a_rather_long_module_name.another_one.norm_of_k, transformer.py:781"
            ),
        ]
    return FusionReport("DiT", 0, sites, seconds=0.0412)


TWO = FusionReport("TwoNorms", 1, [fused(), declined(node="layer_norm_1")], seconds=0.0021)


def words(text):
    """The text without line breaks, to look for what may have been wrapped."""
    return " ".join(text.split())


class Stream(io.StringIO):
    encoding = "utf-8"
    tty = False

    def isatty(self):
        return self.tty


# -- objects and JSON


def test_counts():
    assert (dit().found, dit().fused, dit().declined) == (168, 140, 28)
    assert (FusionReport().found, FusionReport().fused, FusionReport().declined) == (0, 0, 0)
    # The original graph runs: nothing in it is fused, whatever was planned.
    assert replace(TWO, error="boom").fused == 0


def test_dict_lists_every_site_with_every_key():
    data = dit(2).to_dict()
    assert " ".join(data) == "name graph found fused declined error seconds notes choice sites rotary"
    assert len(data["sites"]) == 12
    site = fused("a, m.py:1", hidden_kernels=("Slice",), call=call_of(lambda: "code")).to_dict()
    texts = {"status": "fused", "pattern": "norm", "where": "a, m.py:1"}
    texts |= dict.fromkeys(("reason", "node", "region", "device", "note", "remedy", "chain", "self_check",
                            "fallback"), "")
    texts["kernel"] = "aln_kernel"
    lists = {"kernels_removed": ["layer_norm"], "hidden_kernels": ["Slice"], "ways": [],
             "kernels_behind": []}
    numbers = {"bytes_before": 40 * MIB, "bytes_after": 20 * MIB, "symbolic": False}
    assert site == {**texts, **lists, **numbers}


def test_the_kernel_name_outlives_the_way_it_was_made():
    site = fused(call=call_of(lambda: "code"))
    again = SiteReport.from_dict(json.loads(json.dumps(site.to_dict())))
    assert again == site and again.call is None
    assert again.kernel_name() == site.kernel_name() == "aln_kernel"
    assert fused().kernel_name() == "" == declined(call=call_of(lambda: "code")).kernel_name()


@pytest.mark.parametrize("report", [dit(3), TWO, FusionReport("X", 2, error="boom")], ids=repr)
def test_json_round_trip(report):
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert FusionReport.from_dict(data) == report


def test_json_is_strict():
    text = replace(TWO, seconds=float("nan")).to_json(indent=None)

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse)["seconds"] is None
    assert FusionReport.from_dict(json.loads(text)).seconds == 0.0
    with pytest.raises(ValueError, match="JSON compliant"):
        FusionReport("M", 0, [fused(bytes_before=float("nan"))]).to_json()


def test_from_dict_passes_over_what_a_later_version_adds():
    data = TWO.to_dict()
    data["sites"][0]["colour"] = data["colour"] = "red"
    assert FusionReport.from_dict(data) == TWO


def test_source_is_no_part_of_the_value():
    with_source = fused(call=call_of(lambda: "code"))
    assert with_source == fused()
    assert hash(with_source) == hash(fused())


def test_unknown_status_is_refused():
    with pytest.raises(ValueError, match="status"):
        SiteReport("skipped", "norm", "here")


# -- the table


@pytest.mark.parametrize("report", [dit(), dit(1), TWO], ids=["28 layers", "one layer", "two"])
@pytest.mark.parametrize("width", [None, 60, 80, 120])
def test_no_line_is_wider_than_asked(report, width):
    lines = render(report, width=width).splitlines()
    assert max(map(len, lines)) <= (width or 80)
    assert all(line == line.rstrip() for line in lines)


TWO_AS_TEXT = """\
ascend_ln_fuse: graph 1 of TwoNorms: 2 norm sites, 1 fused, 1 declined (2.1 ms)
  site, pattern and what it replaces                        bytes a site
────────────────────────────────────────────────────────────────────────
✓ norm, m.py:3                                          40.0 -> 20.0 MiB
    norm replaces layer_norm                                   2.0x less
✗ ln_post, m.py:9
    norm: the last size is symbolic (node layer_norm_1)"""


def test_table_of_two_sites():
    assert str(TWO) == TWO_AS_TEXT


def test_equal_layers_are_one_row():
    text = str(dit())
    assert "✓ blocks.{0..27}.norm1, dit.py:52  x28 " in text
    assert "✗ blocks.{0..27}.cross.norm_q, dit.py:77  x28" in text
    assert text.count("✓") + text.count("✗") == 6
    assert len(text.splitlines()) < 30
    assert "add x2" in text and "Fill* x2" in text


def test_a_reason_is_printed_in_full():
    site = dit().sites[4]
    assert words(site.reason) + " (node mul__12)" in words(str(dit()))


def test_declined_sites_come_last_and_the_dict_keeps_graph_order():
    report = FusionReport("M", 0, [declined("a, m.py:1"), fused("b, m.py:2")])
    text = str(report)
    assert text.index("b, m.py:2") < text.index("a, m.py:1")
    assert [site["where"] for site in report.to_dict()["sites"]] == ["a, m.py:1", "b, m.py:2"]


def test_hidden_kernels_are_called_a_prediction():
    text = str(FusionReport("M", 0, [fused(hidden_kernels=("Slice", "Cast", "Cast"))]))
    assert "replaces layer_norm, Slice*, Cast* x2" in text
    assert "* launched unseen on Ascend: predicted from CANN's sources, not measured" in text
    assert "predicted" not in str(TWO)
    text = str(FusionReport("M", 0, [declined(hidden_kernels=("AsStrided",))]))
    assert "still launches AsStrided*" in text and "predicted" in text


def test_symbolic_bytes_are_marked():
    text = str(FusionReport("M", 0, [fused(symbolic=True)]))
    assert "~40.0 -> 20.0 MiB" in text
    assert "~ for the sizes seen at compile time" in text
    assert "~" not in str(TWO)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (300, 100, "300 -> 100 B 3.0x less"),
        (1024, 1024, "1.00 -> 1.00 KiB the same"),
        (3 << 40, 1 << 40, "3.00 -> 1.00 TiB 3.0x less"),
        (10 * MIB, 15 * MIB, "10.0 -> 15.0 MiB 1.5x more"),
        (5 << 60, 5 << 50, "5242880 -> 5120 TiB 1024.0x less"),
        (0, 0, "0 -> 0 B"),
        (2048, None, "2.00 KiB"),
    ],
)
def test_bytes(before, after, shown):
    site = fused("n", kernels_removed=(), bytes_before=before, bytes_after=after)
    row = words(str(FusionReport("M", 0, [site])).split("✓")[1])
    assert row.replace("norm", "").split() == ["n", *shown.split()]


def test_total_of_the_fused_sites():
    sites = [fused("a"), fused("b"), declined("c", bytes_before=MIB), fused("d", bytes_after=None)]
    assert "all fused sites: 80.0 -> 40.0 MiB, 2.0x less" in str(FusionReport("M", 0, sites))
    assert "all fused sites" not in str(TWO)
    empty = [fused(name, bytes_before=0, bytes_after=0) for name in "ab"]
    assert str(FusionReport("M", 0, empty)).endswith("all fused sites: 0 -> 0 B")


def wheres(*names):
    """The titles of the rows for sites at these places."""
    text = str(FusionReport("M", 0, [fused(name) for name in names]))
    return [line[2:-16].strip() for line in text.splitlines() if line.startswith("✓")]


def test_grouping():
    def swin(*depths):
        return [f"layers.{i}.blocks.{j}.n, m.py:1" for i, d in enumerate(depths) for j in range(d)]

    assert wheres("a.0.n", "a.1.n", "a.3.n", "a.4.n", "a.5.n") == ["a.{0,1,3..5}.n  x5"]
    assert wheres("a[0].n", "a[1].n") == ["a[{0,1}].n  x2"]
    assert wheres("9.n", "10.n", "11.n") == ["{9..11}.n  x3"]
    assert wheres(*swin(3, 3)) == ["layers.{0,1}.blocks.{0..2}.n, m.py:1  x6"]
    assert wheres(*swin(2, 3, 1)) == [
        "layers.0.blocks.{0,1}.n, m.py:1  x2",
        "layers.1.blocks.{0..2}.n, m.py:1  x3",
        "layers.2.blocks.0.n, m.py:1",
    ]
    assert wheres("shared, m.py:1", "shared, m.py:1") == ["shared, m.py:1  x2"]
    # Line numbers and numbers inside a word are no layer indices.
    assert len(wheres("n, m.py:1", "n, m.py:2", "norm1", "norm2")) == 4


def test_sites_that_differ_in_what_is_shown_are_not_grouped():
    def rows(**second):
        sites = [fused("a.0.n"), fused("a.1.n", **second)]
        return str(FusionReport("M", 0, sites)).count("✓")

    assert rows(node="other", call=call_of(lambda: "code")) == 1
    assert rows(region="other") == rows(bytes_after=MIB) == rows(note="other") == 2
    assert rows(hidden_kernels=("Slice",)) == 2
    reasons = [declined("a.0.n", "one"), declined("a.1.n", "two")]
    assert str(FusionReport("M", 0, reasons)).count("✗") == 2


HOSTILE = "[red]x[/red] [/] :smile: \\[b] \x1b[31m\r\x07\u202e\nend"
SPELLED = r"[red]x[/red] [/] :smile: \[b] \x1b[31m\r\x07\u202e\nend"


@pytest.mark.parametrize("color", [False, True])
def test_names_of_the_user_are_shown_literally(color, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    sites = [
        fused(HOSTILE, note=HOSTILE, region=HOSTILE, device=HOSTILE),
        replace(declined(HOSTILE, HOSTILE, node=HOSTILE), pattern=HOSTILE),
    ]
    sites[0] = replace(sites[0], kernels_removed=(HOSTILE,), call=call_of(lambda: HOSTILE))
    text = render(FusionReport(HOSTILE, 0, sites), "full", width=400, color=color)
    # Headline, two places, note, reason, node, pattern, op; in the listing place and device.
    shown = "".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())  # without colours, folds, blanks
    expected = "".join(SPELLED.split())
    assert shown.count(expected) == 10
    assert shown.count(expected.replace(r"\nend", "end")) == 2  # region and source keep their lines
    for character in "\r\x07\u202e":
        assert character not in text
    if not color:
        assert "\x1b" not in text


def test_a_failed_pass_says_so_in_one_line_and_why():
    text = str(FusionReport("M", 3, [fused()], error="KeyError: [x]\n  in match\x1b"))
    assert text.splitlines() == [
        "ascend_ln_fuse: graph 3 of M: the pass failed, the original graph runs (0.0 ms)",
        "  KeyError: [x]",
        r"    in match\x1b",
    ]


NO_NORM = "no LayerNorm, RMSNorm or l2 norm was found"


@pytest.mark.parametrize("sites, rotary, words", [
    ([fused()], [], "1 norm site, 1 fused, 0 declined"),
    ([fused(), fused(), declined()], [], "3 norm sites, 2 fused, 1 declined"),
    ([declined(), declined()], [], "2 norm sites, 0 fused, 2 declined"),
    ([], [], NO_NORM),
    ([], [fused()], f"{NO_NORM}; 1 rotary embedding fused"),
    ([], [fused(), declined()], f"{NO_NORM}; 2 rotary embeddings, 1 fused, 1 declined"),
    ([fused()], [fused(), fused()], "1 norm site, 1 fused, 0 declined; 2 rotary embeddings fused"),
    ([fused()], [declined()], "1 norm site, 1 fused, 0 declined; 1 rotary embedding, 0 fused, 1 declined"),
])
def test_headlines(sites, rotary, words):
    assert FusionReport("M", 0, sites, rotary=rotary).headline() == \
        f"ascend_ln_fuse: graph 0 of M: {words} (0.0 ms)"


def test_a_graph_without_a_name():
    assert str(FusionReport("graph 2", 2)).startswith("ascend_ln_fuse: graph 2: no LayerNorm")


def test_what_helps_is_a_line_of_its_own():
    site = declined(remedy="sizes that are static", hidden_kernels=["Slice"])
    lines = str(FusionReport("M", 0, [site])).splitlines()
    assert [line.strip() for line in lines[3:6]] == [
        "✗ ln_post, m.py:9", "norm: the last size is symbolic", "what helps: sizes that are static"]
    assert "what helps" not in str(TWO)


def test_full_adds_region_and_source_of_each_distinct_fused_site():
    region = "region D=128\n  x = load a0"
    source = "def kernel(x):\n\treturn  # " + "long " * 30
    calls = []

    def make():
        calls.append(1)
        return source

    sites = [fused(f"a.{i}.{n}", region=region, call=call_of(make)) for i in range(3) for n in "qk"]
    sites += [fused("b", region="other"), declined("c", region="not this one")]
    text = render(FusionReport("M", 0, sites), "full")
    assert text.count("  region:\n    region D=128\n      x = load a0\n") == 1
    assert text.count("  kernel:\n    def kernel(x):\n        return  # " + "long " * 29) == 1
    assert "    other\n" in text and "not this one" not in text
    assert len(calls) == 1
    assert region not in render(FusionReport("M", 0, sites)) and len(calls) == 1


def test_full_adds_the_kernels_behind_the_products_of_a_chain():
    site = fused("a", call=call_of(lambda: "norm"), chain="linear -> gelu",
                 calls_behind=(call_of(lambda: "def gelu(x): ..."), call_of(lambda: None)))
    text = render(FusionReport("M", 0, [site]), "full")
    assert "  kernels behind the products:\n    def gelu(x): ...\n" in text


def test_a_source_that_fails_does_not_take_the_report_with_it():
    def fail():
        raise RuntimeError("no compiler")

    text = render(FusionReport("M", 0, [fused("a", call=call_of(fail))]), "full")
    assert "not available: RuntimeError: no compiler" in text


# -- emit


def test_emit_writes_to_the_stderr_of_the_moment(capsys):
    emit(TWO)
    captured = capsys.readouterr()
    assert captured.err == render(TWO)
    assert captured.out == ""


@pytest.mark.parametrize("mode", ["off", "table", "full"])
def test_modes(mode, capsys):
    emit(TWO, mode)
    assert capsys.readouterr().err == ("" if mode == "off" else render(TWO, mode))


def test_unknown_mode():
    for use in (emit, render):
        with pytest.raises(ValueError, match="off, table, full"):
            use(TWO, "loud")


def test_width(monkeypatch):
    def width():
        monkeypatch.setattr(sys, "stderr", Stream())
        emit(dit())
        return max(map(len, sys.stderr.getvalue().splitlines()))

    assert width() == 80
    # At some point lines only get harder to follow.
    widths = {"100": 100, "300": 110, "": 80, "0": 80, "-3": 80, "wide": 80}
    for columns, expected in widths.items():
        monkeypatch.setenv("COLUMNS", columns)
        assert width() == expected, columns


@pytest.mark.parametrize("tty", [False, True])
def test_colour_only_on_a_terminal(tty, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Stream())
    sys.stderr.tty = tty
    emit(TWO)
    assert ("\x1b[" in sys.stderr.getvalue()) is tty


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no-such-encoding"])
def test_a_stream_without_unicode_gets_ascii(encoding, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream())
    sys.stderr.encoding = encoding
    emit(replace(TWO, name="Modèle"))
    text = sys.stderr.getvalue()
    assert text.isascii()
    assert "graph 1 of Mod\\xe8le" in text
    assert "-" * 60 in text and "\n+ norm, m.py:3" in text and "\nx ln_post" in text


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


class Broken:
    encoding = 3

    def write(self, text):
        raise BrokenPipeError

    def isatty(self):
        raise RuntimeError


@pytest.mark.parametrize("stream", [closed(), None, Broken(), object()],
                         ids=["closed", "none", "broken", "no stream"])
def test_emit_survives_any_stderr(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    emit(TWO)


def test_a_stream_that_can_only_write_is_enough(monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append))
    emit(TWO)
    assert written == [render(TWO)]


def test_without_a_table_there_is_still_the_headline(monkeypatch, capsys):
    def fail(*args):
        raise ImportError("no rich")

    monkeypatch.setattr(report_module, "_table", fail)
    emit(TWO)
    assert capsys.readouterr().err.splitlines() == [
        TWO.headline(),
        "  (no table: ImportError: no rich)",
    ]


def test_importing_costs_neither_torch_nor_rich():
    code = """if True:
        import runpy, sys
        report = runpy.run_path(sys.argv[1], run_name="report")
        report["emit"](report["FusionReport"](), "off")
        runpy.run_path(sys.argv[2])
        assert not {"torch", "rich"} & set(sys.modules)"""
    places = [importlib.util.find_spec(f"ascend_ln_fuse.{m}").origin for m in ("report", "hidden")]
    subprocess.run([sys.executable, "-c", code, *places], check=True)


# -- history


def test_history_is_bounded_and_newest_last():
    for i in range(300):
        record(FusionReport(graph_index=i))
    assert [r.graph_index for r in last_reports()] == list(range(44, 300))
    last_reports().clear()  # a copy
    assert len(last_reports()) == 256
    clear_reports()
    assert last_reports() == []


def test_history_and_emit_from_many_threads(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream())
    start = threading.Barrier(8)

    def work(n):
        start.wait()
        for i in range(25):
            record(FusionReport(graph_index=n * 25 + i))
            assert all(isinstance(report, FusionReport) for report in last_reports())
        emit(TWO)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))  # raises what a thread raised
    assert sorted(report.graph_index for report in last_reports()) == list(range(200))
    assert sys.stderr.getvalue() == render(TWO) * 8  # whole tables, one after the other
