"""The choice between a graph's forms in front of a compiler that fuses on its own: fakes stand for the
compiler, the accelerator and its clock."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from small_models import Projected
from torch import nn
from torch._dynamo.exc import RestartAnalysis
from torch._inductor import config as inductor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ascend_ln_fuse import Options, backend, inner_choice, last_reports
from ascend_ln_fuse.inner_choice import clearly_less
from ascend_ln_fuse.kernels import measure
from ascend_ln_fuse.kernels.store import Store

REGION = torch.ops.ascend_ln_fuse.region.default
INNER = "fuser"
FUSED, SHORT, PLAIN = inner_choice.FUSED, inner_choice.SHORT, inner_choice.PLAIN


class Fuser:
    """An inner compiler that runs graphs as they are.

    Attributes:
        compiled: the forms in the order in which they came.
        ran: the forms of the calls.
        fail, fail_run: form -> what compiling it raises, and calling it.
    """

    def __init__(self):
        self.compiled, self.ran, self.fail, self.fail_run = [], [], {}, {}

    def __call__(self, gm, inputs, **kwargs):
        targets = {node.target for node in gm.graph.nodes}
        form = PLAIN if REGION not in targets else SHORT if F.layer_norm in targets else FUSED
        self.compiled.append(form)
        if form in self.fail:
            raise self.fail[form]

        def run(*args):
            self.ran.append(form)
            if form in self.fail_run:
                raise self.fail_run[form]
            return gm.forward(*args)

        run.form = form
        return run


class Clock:
    """`times`: milliseconds of each form; `measured`: how often both were timed."""

    def __init__(self):
        self.times, self.measured, self.capturing = {FUSED: [1.0] * 5, PLAIN: [2.0] * 5}, 0, False

    def by_turns(self, calls, device, seconds):
        self.measured += 1
        for call in calls:
            call()
        return [self.times[call.func.form] for call in calls]


@pytest.fixture
def fuser(monkeypatch):
    made = Fuser()
    monkeypatch.setattr(backend, "inner_compiler", lambda name: made)
    return made


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """An accelerator with that clock, and a store of this test's own."""
    made = Clock()
    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ASCEND_LN_FUSE_STRICT")
    new_process(monkeypatch)
    monkeypatch.setattr(backend, "device_type", lambda inputs: "cuda")
    monkeypatch.setattr(inner_choice, "_accelerator", lambda inputs: (torch.device("cpu"), ""))
    monkeypatch.setattr(measure, "by_turns", made.by_turns)
    monkeypatch.setattr(measure, "is_capturing", lambda device: made.capturing)
    return made


def new_process(monkeypatch):
    """Nothing is known but what is on disk."""
    torch._dynamo.reset()
    monkeypatch.setattr(inner_choice, "_store", Store("inner"))


def run(model, *inputs, options=(), **compile_options):
    """One call; it must be right, whatever runs."""
    compiled = torch.compile(model, backend="ascend_ln_fuse", **compile_options,
                             options={"report": "off", "inner": INNER, **dict(options)})
    with torch.no_grad():
        result = compiled(*inputs)
        torch.testing.assert_close(result, model(*inputs))
    return last_reports()[-1]


def x(rows=2):
    return torch.randn(rows, 3, 16)


# Which form runs


@pytest.mark.parametrize("fused, plain, kept", [
    ([1.0] * 5, [2.0] * 5, FUSED),
    ([2.0] * 5, [1.0] * 5, PLAIN),
    ([1.0] * 5, [1.0] * 5, PLAIN),
    ([1.0] * 5, [1.005] * 5, PLAIN),  # less than the margin
    ([1.0, 1.0, 1.0, 3.0, 3.0], [1.2, 1.2, 1.2, 1.2, 1.2], PLAIN),  # noise
    ([700.0], [900.0], FUSED),  # too long to be timed twice
])
def test_the_faster_form_is_kept(fused, plain, kept, fuser, clock):
    clock.times = {FUSED: fused, PLAIN: plain}
    report = run(Projected(), x())
    assert sorted(fuser.compiled) == [FUSED, PLAIN] and clock.measured == 1
    assert fuser.ran[-1] == kept  # the model's call
    assert clearly_less(fused, plain) is (kept == FUSED)
    assert report.fused == (kept == FUSED)
    site, = report.sites
    assert (site.status, site.reason) == (("fused", "") if kept == FUSED else
                                          ("declined", inner_choice.LEFT_SLOWER))
    assert site.remedy == ("" if kept == FUSED else '`inner_choice="fuse"`')
    assert report.choice.startswith("fused, with fuser around: plain" if kept == FUSED else
                                    "left to fuser: plain")


def test_the_report_has_the_times(fuser, clock, capsys):
    clock.times = {FUSED: [12.94] * 3, PLAIN: [12.34] * 3}
    report = run(Projected(), x(), options={"report": "table"})
    assert report.choice == "left to fuser: plain 12.3 ms, fused 12.9 ms"
    assert json.loads(report.to_json())["choice"] == report.choice
    assert type(report).from_dict(report.to_dict()).choice == report.choice
    printed = capsys.readouterr().err
    assert report.choice in printed and "left to the inner compiler, which is" in " ".join(printed.split())
    assert printed.count("graph") == 1  # one report


def test_a_long_compilation_says_that_there_is_another(fuser, clock, monkeypatch, capsys):
    monkeypatch.setattr(inner_choice, "LONG_SECONDS", -1.0)
    run(Projected(), x(), options={"report": "table"})
    assert "and now compiles it in other forms (plain)" in capsys.readouterr().err
    new_process(monkeypatch)
    run(Projected(), x(5))
    assert not capsys.readouterr().err


def test_every_graph_has_its_own_choice(fuser, clock):
    model = Projected()
    run(model, x(2), dynamic=False)
    clock.times = {FUSED: [2.0], PLAIN: [1.0]}
    run(model, x(3), dynamic=False)
    assert [report.fused for report in last_reports()] == [1, 0] and clock.measured == 2


def test_a_graph_without_sites_is_compiled_once(fuser, clock):
    run(nn.Linear(16, 16), x())
    assert fuser.compiled == [PLAIN] and not clock.measured and not last_reports()[-1].choice


def test_fuse_asks_nobody(fuser, clock):
    report = run(Projected(), x(), options={"inner_choice": "fuse"})
    assert fuser.compiled == [FUSED] and report.fused == 1 and not report.choice


@pytest.mark.parametrize("inner", backend.RUN_AS_WRITTEN)
def test_compilers_that_fuse_nothing_are_not_measured(inner, fuser, clock):
    run(Projected(), x(), options={"inner": inner})
    assert not clock.measured and len(fuser.compiled) == 1 and last_reports()[-1].fused == 1


def test_nothing_is_measured_on_a_cpu(fuser, clock, monkeypatch):
    monkeypatch.setattr(backend, "device_type", lambda inputs: "cpu")
    report = run(Projected(), x())
    assert fuser.compiled == [FUSED] and report.fused == 1 and not clock.measured


class Heads(nn.Module):
    """A long row, and two short ones in one launch."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(512), nn.Linear(512, 96)
        self.norm_q, self.norm_k = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x.bfloat16().float())).view(-1, 3, 2, 16).unbind(1)
        return self.norm_q(q), self.norm_k(k), v


@pytest.mark.parametrize("fused, short, kept", [
    (1.0, 0.9, SHORT), (0.9, 1.0, FUSED), (3.0, 1.0, SHORT), (1.0, 3.0, FUSED), (3.0, 3.0, PLAIN),
    (1.99, 1.99, PLAIN)])
def test_sites_of_short_rows_alone(fused, short, kept, fuser, clock, monkeypatch):
    clock.times = {FUSED: [fused], SHORT: [short], PLAIN: [2.0]}
    model = Heads()
    report = run(model, torch.randn(4, 512))
    assert fuser.compiled == [FUSED, SHORT, PLAIN] and fuser.ran[-1] == kept
    assert report.fused == {FUSED: 3, SHORT: 2, PLAIN: 0}[kept] and report.found == 3
    assert [site.status for site in report.sites][1:] == ["declined" if kept == PLAIN else "fused"] * 2
    assert report.choice.endswith(f"plain 2.000 ms, fused {fused:.3f} ms, short rows fused {short:.3f} ms")
    assert report.choice.split(":")[0] == ("left to fuser" if kept == PLAIN else f"{kept}, with fuser around")
    new_process(monkeypatch)
    del fuser.compiled[:]
    assert run(model, torch.randn(4, 512)).to_dict()["sites"] == report.to_dict()["sites"]
    assert fuser.compiled == [kept]


def test_a_form_that_fails_leaves_the_others(fuser, clock, monkeypatch):
    clock.times = {FUSED: [1.0], SHORT: [1.5], PLAIN: [2.0]}
    fuser.fail[FUSED] = RuntimeError("no lowering")
    report = run(Heads(), torch.randn(4, 512))
    assert fuser.ran[-1] == SHORT and report.fused == 2
    assert report.choice == ("short rows fused, with fuser around: plain 2.000 ms, "
                             "short rows fused 1.500 ms; fused: RuntimeError: no lowering")
    new_process(monkeypatch)  # nothing is kept
    fuser.fail.clear()
    assert run(Heads(), torch.randn(4, 512)).fused == 3


def test_a_form_that_cannot_be_made_is_none(fuser, clock, monkeypatch):
    original = backend.fuse

    def fuse(graph, options, wanted=None, **others):
        if wanted is not None:
            raise RuntimeError("broken")
        return original(graph, options, wanted, **others)

    monkeypatch.setattr(backend, "fuse", fuse)
    assert run(Heads(), torch.randn(4, 512)).fused == 3
    assert fuser.compiled == [FUSED, PLAIN]


# What is remembered


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kept", [FUSED, PLAIN])
def test_the_next_process_compiles_the_chosen_form_only(kept, dynamic, fuser, clock, monkeypatch):
    if kept == PLAIN:
        clock.times = {FUSED: [3.0], PLAIN: [2.5]}
    model = Projected()
    first = run(model, x(), dynamic=dynamic)
    del fuser.compiled[:]
    new_process(monkeypatch)
    second = run(model, x(), dynamic=dynamic)
    assert fuser.compiled == [kept] and clock.measured == 1
    assert second.choice == first.choice


@pytest.mark.parametrize("change", [
    {"self_check": "always"}, {"inner": "another"}, {"training": "decline"}], ids=str)
def test_settings_are_part_of_the_question(change, fuser, clock):
    run(Projected(), x())
    torch._dynamo.reset()
    run(Projected(), x(), options=change)
    assert clock.measured == 2


def test_sizes_strides_and_dtypes_are_part_of_the_question(fuser, clock):
    model = Projected()
    for given in (x(2), x(5), torch.randn(3, 2, 16).transpose(0, 1), x(2).double()):
        model.to(given.dtype)
        torch._dynamo.reset()
        run(model, given, dynamic=False)
    assert clock.measured == 4


def test_symbolic_sizes_count_by_their_power_of_two(fuser, clock):
    for rows in (5, 8, 9):
        torch._dynamo.reset()
        run(Projected(), x(rows), dynamic=True)
    assert clock.measured == 2


@pytest.mark.parametrize("entry", [
    b"", b"{", b"\xff\x00", {"form": "melted", "times": {}, "reason": ""}, {"form": FUSED},
    {"form": SHORT, "times": {}, "reason": ""},  # this graph has no such form
    {"form": FUSED, "times": {"plain": "1"}, "reason": ""}, {"form": FUSED, "times": [], "reason": ""},
    {"form": [FUSED], "times": {}, "reason": ""}, {"form": FUSED, "times": {}, "reason": None}], ids=str)
def test_a_strange_entry_is_measured_again(entry, fuser, clock, monkeypatch, tmp_path):
    run(Projected(), x())
    file, = Path(tmp_path, "inner").glob("*.json")
    if isinstance(entry, dict):
        entry = json.dumps({**json.loads(file.read_text()), "value": entry}).encode()
    file.write_bytes(entry)
    new_process(monkeypatch)
    run(Projected(), x())
    assert clock.measured == 2


def test_a_choice_made_while_a_kernel_fell_back_is_not_kept(fuser, clock, monkeypatch):
    from ascend_ln_fuse.report import SiteReport

    with monkeypatch.context() as patched:
        patched.setattr(SiteReport, "fallback_words", lambda site: "it does not compile")
        run(Projected(), x())
    new_process(monkeypatch)
    run(Projected(), x())
    assert clock.measured == 2


# What is not measured


class Counting(nn.Module):
    """Writes a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(x.bfloat16().float())


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(F.dropout(x, 0.5).bfloat16().float()) * 0


@pytest.mark.parametrize("model, why", [(Counting, "an input is written"), (Dropped, "random numbers")])
def test_a_graph_that_must_run_once_is_left(model, why, fuser, clock):
    model = model()
    report = run(model, x())
    assert fuser.compiled == [PLAIN] and fuser.ran == [PLAIN] and not clock.measured
    assert why in report.choice and report.sites[0].reason == inner_choice.LEFT_UNKNOWN
    if isinstance(model, Counting):
        assert model.calls == 2  # the compiled call's and eager's


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(16), dropout

    def forward(self, x):
        q = self.norm(x.bfloat16().float())
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout) * (self.dropout == 0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_for_its_dropout_only(dropout, fuser, clock):
    run(Attention(dropout), x())
    assert clock.measured == (dropout == 0)


def test_states_that_a_graph_sets_back_are_no_reason(fuser, clock):
    class Cast(Projected):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = super().forward(x)
            return x + 1

    run(Cast(), x())
    assert clock.measured == 1


def test_written_values_of_the_graphs_own_are_no_reason(fuser, clock):
    class InPlace(Projected):
        def forward(self, x):
            return super().forward(x.sin().mul_(2)).relu_()

    run(InPlace(), x())
    assert clock.measured == 1


def test_gradients_are_left_to_the_inner_compiler(fuser, clock):
    model = Projected()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off", "inner": INNER})
    compiled(x()).sum().backward()
    assert fuser.compiled == [PLAIN] and not clock.measured
    assert "gradients are recorded" in last_reports()[-1].choice
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ascend_ln_fuse",
                             options={"report": "off", "inner": INNER, "inner_choice": "fuse"})
    compiled(x()).sum().backward()
    assert fuser.compiled == [PLAIN, FUSED] and last_reports()[-1].fused == 1


def test_nothing_is_measured_while_a_graph_is_captured(fuser, clock, monkeypatch):
    clock.capturing = True
    assert "captured" in run(Projected(), x()).choice
    assert fuser.compiled == [PLAIN] and not clock.measured
    clock.capturing = False  # and that is not kept
    new_process(monkeypatch)
    assert run(Projected(), x()).fused == 1
    clock.capturing = True  # what is known is taken
    new_process(monkeypatch)
    assert run(Projected(), x()).fused == 1 and clock.measured == 1


def test_inputs_without_data_are_not_run():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    assert inner_choice._unreal([fake]) and inner_choice._unreal([torch.ones(2), object()])
    assert not inner_choice._unreal([torch.ones(2), nn.Parameter(torch.ones(2)), 3])
    seen = []
    torch.func.vmap(lambda t: seen.append(inner_choice._unreal([t])) or t)(torch.ones(2))
    assert seen == ["the inputs are no plain tensors"]


@pytest.mark.parametrize("devices, why", [
    (["cpu"], "no accelerator"), (["meta", "cpu"], "no clock on meta")])
def test_devices_that_cannot_be_timed(devices, why):
    assert inner_choice._accelerator([torch.ones(1, device=d) for d in devices])[1] == why


# Failures


@pytest.mark.parametrize("stage", ["fail", "fail_run"])
def test_a_fused_form_that_fails_is_left(stage, fuser, clock, monkeypatch):
    getattr(fuser, stage)[FUSED] = RuntimeError("no lowering\nfor it")
    report = run(Projected(), x())
    assert fuser.ran[-1] == PLAIN and not clock.measured
    assert report.choice == "left to fuser: fused: RuntimeError: no lowering"
    assert report.sites[0].reason == inner_choice.LEFT_UNKNOWN
    getattr(fuser, stage).clear()  # it is not kept
    new_process(monkeypatch)
    assert run(Projected(), x()).fused == 1


@pytest.mark.parametrize("stage", ["fail", "fail_run"])
@pytest.mark.parametrize("way", ["environment", "option"])
def test_failures_that_shall_raise(way, stage, fuser, clock, monkeypatch):
    if way == "environment":
        monkeypatch.setenv("ASCEND_LN_FUSE_STRICT", "1")
    getattr(fuser, stage)[FUSED] = RuntimeError("no lowering")
    with pytest.raises(Exception, match="no lowering"):
        run(Projected(), x(), options={"self_check": "raise"} if way == "option" else {})


def test_a_remembered_form_that_fails_now(fuser, clock, monkeypatch):
    run(Projected(), x())
    new_process(monkeypatch)
    fuser.fail[FUSED] = RuntimeError("no lowering")
    assert "no lowering" in run(Projected(), x()).choice and fuser.ran[-1] == PLAIN


def test_a_plain_form_that_fails(fuser, clock):
    fuser.fail[PLAIN] = RuntimeError("no luck")
    report = run(Projected(), x())
    assert fuser.ran[-1] == FUSED and report.fused == 1
    assert report.choice == "fused, with fuser around: plain: RuntimeError: no luck"


def test_two_forms_that_fail(fuser, clock):
    fuser.fail.update({FUSED: RuntimeError("no lowering"), PLAIN: RuntimeError("no luck")})
    with pytest.raises(Exception, match="no luck"):
        run(Projected(), x())
    assert last_reports()


def test_a_clock_that_fails(fuser, clock, monkeypatch):
    def by_turns(calls, device, seconds):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(measure, "by_turns", by_turns)
    report = run(Projected(), x())
    assert fuser.ran[-1] == PLAIN and "none left" in report.choice
    assert not list(Path(inner_choice._store._folder()).iterdir())


@pytest.mark.parametrize("error", [RestartAnalysis("again"), RuntimeError("an illegal memory access"),
                                   KeyboardInterrupt()], ids=str)
def test_what_is_no_reason_to_take_the_other_form(error, fuser, clock):
    fuser.fail[FUSED] = error
    with pytest.raises(type(error)):
        inner_choice.choose(question(fuser))
    assert fuser.compiled == [FUSED]


def question(fuser) -> inner_choice.Question:
    """Of a graph in front of `fuser`, without Dynamo."""
    given = x()
    plain = make_fx(lambda x: F.layer_norm(x, (16,)) + 1, tracing_mode="fake")(given)
    graph, _ = backend.fuse_graph(plain.graph, Options(inner=INNER))
    fused = torch.fx.GraphModule(plain, graph)
    return inner_choice.Question(INNER, {FUSED: fused, PLAIN: plain}, [given],
                                 lambda form: fuser(form, [given]))


# Inductor's settings


def test_where_graphs_are_recorded_the_trial_goes_without(fuser, clock, monkeypatch):
    """Both forms are compiled for the trial and timed as graphs replay them; the chosen one is compiled
    again."""
    replayed = []
    monkeypatch.setattr(measure, "replayed", lambda call, device: replayed.append(call.func.form) or call)
    asked = question(fuser)
    trials = []

    def compile_trial(form):
        trials.append(form)
        return fuser(form, ())

    compiled, choice = inner_choice.choose(replace(asked, compile_trial=compile_trial))
    assert trials == [*asked.forms.values()] and replayed == [FUSED, PLAIN]
    assert fuser.compiled == [FUSED, PLAIN, FUSED] and compiled.form == choice.form == FUSED
    inner_choice.choose(replace(asked, compile_trial=compile_trial))  # known: no trial
    assert len(trials) == 2 and fuser.compiled[3:] == [FUSED]


def test_modes_become_settings_of_inductors():
    assert inner_choice.inductor_arguments({}) == {}
    given = inner_choice.inductor_arguments({"mode": "reduce-overhead"})
    assert given == {"config_patches": {"triton.cudagraphs": True}}
    assert inner_choice.without_cuda_graphs("inductor", given) == {
        "config_patches": {"triton.cudagraphs": False}}
    tuned = inner_choice.inductor_arguments({"mode": "max-autotune-no-cudagraphs"})
    assert tuned["config_patches"]["max_autotune"]
    for name, kwargs in (("inductor", {}), ("inductor", tuned), ("other", given)):
        assert inner_choice.without_cuda_graphs(name, kwargs) is None
    with inductor.patch({"triton.cudagraphs": True}):
        assert inner_choice.without_cuda_graphs("inductor", {}) == {
            "config_patches": {"triton.cudagraphs": False}}


def test_inductors_settings_are_part_of_the_question():
    def settings(**kwargs):
        return inner_choice.settings_of("inductor", kwargs, Options())

    assert settings() == settings() != settings(config_patches={"max_autotune": True})
    with inductor.patch(max_autotune=not inductor.max_autotune):
        changed = settings()
    assert changed != settings()
    assert inner_choice.settings_of("other", {}, Options()) != settings()


def test_a_mode_reaches_inductor(monkeypatch):
    """As a function, the backend takes a mode beside its options."""
    seen = []
    monkeypatch.setattr(backend, "inner_compiler",
                        lambda name: lambda gm, inputs, **kwargs: seen.append(kwargs) or gm.forward)
    ours = partial(backend.ascend_ln_fuse, options={"report": "off", "inner": "inductor"})
    with torch.no_grad():
        torch.compile(Projected(), backend=ours, mode="max-autotune-no-cudagraphs")(x())
    assert seen[0]["config_patches"]["max_autotune"]


def test_the_text_of_a_graph_is_the_same_in_every_process():
    def text():
        return inner_choice.graph_text(question(Fuser()).forms[PLAIN].graph)

    assert text() == text() and " at 0x" not in text()
    assert "layer_norm" in text() and "torch.float32 ['2', '3', '16'] ['48', '16', '1'] cpu" in text()


# Threads


def test_measurements_wait_for_each_other(fuser, clock, monkeypatch):
    """Two at a time would measure each other; the second finds what the first has kept."""
    inside, most = [0], [0]
    by_turns = clock.by_turns

    def counted(*args):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        result = by_turns(*args)
        inside[0] -= 1
        return result

    monkeypatch.setattr(measure, "by_turns", counted)
    with ThreadPoolExecutor(8) as pool:
        choices = [choice for _, choice in pool.map(inner_choice.choose, [question(fuser)] * 8)]
    assert most == [1] and clock.measured == 1 and len(set(map(str, choices))) == 1
