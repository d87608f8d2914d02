"""Profiles: files as torch_npu and msprof write them, hidden kernels per norm, and the report's kernels."""

import codecs
import csv
import io
import json
import os

import pytest

from ascend_ln_fuse.profile import (
    NAME_LENGTH,
    Launch,
    ProfileError,
    analyse,
    read_launches,
    read_profile,
    read_reports,
)
from ascend_ln_fuse.report import FusionReport, SiteReport

HEADER = ("Step Id,Device_id,Model ID,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,Start Time(us),"
          "Duration(us),Wait Time(us),Block Dim,Mix Block Dim,HF32 Eligible,Input Shapes,Input Data Types")
MSPROF = ("Device_id,Model ID,Task ID,Stream ID,Op Name,OP Type,OP State,Task Type,Task Start Time(us),"
          "Task Duration(us),Task Wait Time(us),Block Num,Mix Block Num,HF32 Eligible,Input Shapes")
KERNEL = "aln_layer_norm_0123456789"


def row(start, name, kind, shapes='"""1,2"""', stream=2):
    return f"0,0,4294967295,{start},{stream},{name},{kind},dynamic,AI_VECTOR_CORE,{start}.25\t,7,0,40,0,NO," \
           f"{shapes},DT_BF16"


def kernel_details(tmp_path, rows, encoding="utf-8", header=HEADER, name="kernel_details.csv"):
    path = tmp_path / name
    path.write_bytes("\n".join([header, *rows, ""]).encode(encoding))
    return path


#: Out of order, as rows of several streams are: a strided bf16 LayerNorm, twice, and what else runs.
ROWS = [
    row(30, "aclnnLayerNorm_CastAiCore_Cast", "Cast"),
    row(31, "aclnnLayerNorm_CastAiCore_Cast", "Cast"),
    row(10, "aclnnMatmul_MatMulV2_MatMulV2", "MatMulV2"),
    row(20, "aclnnLayerNorm_SliceAiCore_Slice", "Slice"),
    row(25, "aclnnLayerNorm_LayerNormV3AiCore_LayerNormV3", "LayerNormV3", '"""4096,20,128;128;128"""'),
    row(40, "aclnnLayerNorm_SliceAiCore_Slice", "Slice"),
    row(45, "aclnnLayerNorm_LayerNormV3AiCore_LayerNormV3", "LayerNormV3", '"""4096,20,128;128;128"""'),
    row(46, "aclnnLayerNorm_CastAiCore_Cast", "Cast"),
    row(47, "aclnnLayerNorm_CastAiCore_Cast", "Cast"),
    row(50, "aclnnLayerNorm_LayerNormV3AiCore_LayerNormV3", "LayerNormV3", '"""4096,2560;2560;2560"""'),
    row(60, "aclnnInplaceCopy_SliceAiCore_Slice", "Slice"),
    row(61, "aclnnCast_CastAiCore_Cast", "Cast"),
    row(70, KERNEL, KERNEL),
    row(71, KERNEL, KERNEL),
]


def summary(profile):
    return [(n.api, n.kernel, n.shapes, n.launches, dict(n.hidden)) for n in profile.norms]


EXPECTED = [
    ("aclnnLayerNorm", "LayerNormV3", "4096,20,128;128;128", 2, {"Slice": 2, "Cast": 4}),
    ("aclnnLayerNorm", "LayerNormV3", "4096,2560;2560;2560", 1, {}),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gbk", "utf-16"])
def test_kernel_details(tmp_path, encoding):
    rows = [*ROWS, row(5, "自定义算子", "自定义")]
    found = read_profile(kernel_details(tmp_path, rows, encoding))
    assert summary(found) == EXPECTED
    assert (found.rows, found.hidden) == (15, 6)
    assert found.copies == {"Slice": 1, "Cast": 1} and found.ours == {KERNEL: 2} and not found.stray
    names = [launch.name for launch in read_launches(tmp_path / "kernel_details.csv")]
    assert names[0] == "自定义算子" and names[2] == "aclnnLayerNorm_SliceAiCore_Slice"


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_utf_16_of_either_order(tmp_path, mark):
    path = kernel_details(tmp_path, ROWS)
    text = path.read_text()
    order = "le" if mark == codecs.BOM_UTF16_LE else "be"
    path.write_bytes(mark + text.encode(f"utf-16-{order}"))
    assert summary(read_profile(path)) == EXPECTED
    path.write_bytes(mark + b"\x00")
    with pytest.raises(ProfileError, match="is not UTF-8, UTF-16 with its mark, or GBK"):
        read_profile(path)


@pytest.mark.parametrize("delimiter", [";", "\t"])
@pytest.mark.parametrize("told", [False, True])
def test_what_a_spreadsheet_makes_of_it(tmp_path, delimiter, told):
    """Semicolons or tabs between cells, and a comma in numbers."""
    path = kernel_details(tmp_path, ROWS)
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(path.read_text()))]
    start = rows[0].index("Start Time(us)")
    rows[1:] = [[*row[:start], row[start].replace(".", ","), *row[start + 1:]] for row in rows[1:]]
    with path.open("w", newline="") as file:
        if told:
            file.write(f"sep={delimiter}\n")
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert summary(read_profile(path)) == EXPECTED
    assert read_launches(path)[0].kernel == "MatMulV2", "in the order of their start"


def test_a_pipe(tmp_path):
    text = kernel_details(tmp_path, ROWS).read_bytes()
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    assert summary(read_profile(f"/dev/fd/{reader}")) == EXPECTED
    os.close(reader)
    with pytest.raises(ProfileError, match="/dev/null is empty"):
        read_profile("/dev/null")
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        read_reports(tmp_path)


def test_op_summary_of_msprof(tmp_path):
    rows = [f"0,4294967295,{i},2,{name},{kind},N/A,AI_VECTOR_CORE,{start}\t,9,1,40,0,NO,{shapes}"
            for i, (start, name, kind, shapes) in enumerate([
                (100, "aclnnAddRmsNorm_AsStridedAiCore_AsStrided", "AsStrided", "N/A"),
                (101, "aclnnAddRmsNorm_AddRmsNormAiCore_AddRmsNorm", "AddRmsNorm", '"8,64;8,64;64"'),
                (102, KERNEL, "N/A", "N/A")])]
    path = kernel_details(tmp_path, rows, header=MSPROF, name="op_summary_20261130.csv")
    found = read_profile(path)
    assert summary(found) == [("aclnnAddRmsNorm", "AddRmsNorm", "8,64;8,64;64", 1, {"AsStrided": 1})]
    assert found.launches(KERNEL) == 1


def test_missing_and_extra_columns(tmp_path):
    header, rows = "Extra,Name\n", ["x,aclnnLayerNorm_TransposeAiCore_Transpose,,,",
                                    "y,aclnnLayerNorm_LayerNormV4AiCore_LayerNormV4", "", "z"]
    found = read_profile(kernel_details(tmp_path, rows, header=header))
    assert summary(found) == [("aclnnLayerNorm", "LayerNormV4", "", 1, {"Transpose": 1})]


def test_streams_do_not_mix():
    def hidden(stream):
        return Launch("aclnnLayerNorm_SliceAiCore_Slice", "Slice", "", stream)

    def norm(stream):
        return Launch("aclnnLayerNorm_LayerNormV3AiCore_LayerNormV3", "LayerNormV3", f"s{stream}", stream)

    found = analyse([hidden("1"), norm("2"), norm("1"), hidden("2")])
    assert {n.shapes: dict(n.hidden) for n in found.norms} == {"s1": {"Slice": 1}, "s2": {}}
    assert found.stray == {"Slice": 1} and found.hidden == 2


def test_a_cast_in_front_of_the_first_norm():
    found = analyse([Launch("aclnnLayerNorm_CastAiCore_Cast", "Cast"),
                     Launch("aclnnLayerNorm_LayerNormV3AiCore_LayerNormV3", "LayerNormV3")])
    assert dict(found.norms[0].hidden) == {"Cast": 1}


def test_a_folder_of_profiles(tmp_path):
    folder = tmp_path / "host_1" / "ASCEND_PROFILER_OUTPUT"
    folder.mkdir(parents=True)
    with pytest.raises(ProfileError, match=r"no kernel_details\*\.csv or op_summary\*\.csv below"):
        read_profile(tmp_path)
    kernel_details(folder, ROWS)
    assert summary(read_profile(tmp_path)) == EXPECTED
    kernel_details(tmp_path, ROWS)
    with pytest.raises(ProfileError, match="2 profiles below .*name one of them"):
        read_profile(tmp_path)


@pytest.mark.parametrize("content, message", [
    (b"", "is empty"),
    (b"\n\n", "is empty"),
    (b"Kernel,Time\na,1\n", "has no column 'Name' or 'Op Name'; it has Kernel, Time"),
    (b"PK\x03\x04\x00\x00", "is not a text file"),
    (b"Name\n\xff\xff\xff\n", "is not UTF-8, UTF-16 with its mark, or GBK"),
    (b"Name,Type\n", "has a header and no kernel below it"),
    (b"Name,Type\n,\n ,x\n", "has a header and no kernel below it"),
])
def test_files_that_are_no_profile(tmp_path, content, message):
    path = tmp_path / "kernel_details.csv"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def test_no_such_file(tmp_path):
    for read in (read_profile, read_reports):
        with pytest.raises(ProfileError, match="no such file"):
            read(tmp_path / "nothing.csv")


# -- the report's kernels


def report(*kernels):
    sites = [SiteReport("fused", "layer_norm", f"blocks.{i}.norm, m.py:3", kernel=name)
             for i, name in enumerate(kernels)]
    return FusionReport("M", 0, [*sites, SiteReport("declined", "norm", "last, m.py:9", "why")])


def test_each_fused_site_is_looked_up(tmp_path):
    found = read_profile(kernel_details(tmp_path, ROWS))
    sites = found.sites([report(KERNEL, "aln_rms_norm_ffffffffff", ""), FusionReport(error="boom")])
    assert [(s.where.split(",")[0], s.launches) for s in sites] == \
        [("blocks.0.norm", 2), ("blocks.1.norm", 0), ("blocks.2.norm", 0)]


def test_a_profile_shows_the_end_of_a_long_name():
    name = "aln_" + "x" * 60 + "_0123456789"
    found = analyse([Launch("..._aln_" + name[-NAME_LENGTH:], "")])
    assert found.launches(name) == 1 and found.launches("aln_other") == 0


def test_a_name_within_another_is_none_of_ours():
    found = analyse([Launch(f"x{KERNEL}y", ""), Launch(f"{KERNEL}0", ""), Launch(KERNEL, "")])
    assert found.launches(KERNEL) == 1


def test_a_header_again_and_a_long_cell(tmp_path):
    """Files that were put together, and the shapes of a call with very many inputs."""
    limit = csv.field_size_limit()
    shapes = ";".join(["1,2"] * 50_000)
    rows = [*ROWS, HEADER, row(80, KERNEL, KERNEL, f'"""{shapes}"""')]
    launches = read_launches(kernel_details(tmp_path, rows))
    assert len(launches) == len(ROWS) + 1 and launches[-1].shapes == shapes
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("kernel", [None, 5, {}])
def test_a_kernel_that_is_no_name(tmp_path, kernel):
    data = report(KERNEL).to_dict()
    data["sites"][0]["kernel"] = kernel
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="is no report: the kernel and the place of a site are words"):
        read_reports(path)


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: [r, r], lambda r: {"soc": "x", "reports": [r]}])
def test_reports_in_every_form(tmp_path, wrap):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(wrap(report(KERNEL).to_dict())))
    assert all(r.sites[0].kernel_name() == KERNEL for r in read_reports(path))


@pytest.mark.parametrize("text, message", [
    ("", "is empty"), ("[]", "holds no report"), ('{"reports": []}', "holds no report"),
    ("nonsense", "is no JSON"), ("[1]", "is no report"), ('{"sites": [{"status": "x"}]}', "is no report"),
    ('{"a": 1}', "is no report"),
])
def test_json_that_is_no_report(tmp_path, text, message):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        read_reports(path)
