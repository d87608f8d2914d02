"""Every model of the zoo through the backend, compared with eager; a table of what came of it.

    python tests/models/zoo/zoo.py               all models (`make zoo`); goes on where it was stopped
    python tests/models/zoo/zoo.py --write       and write the summary into docs/reliability.md
    python tests/models/zoo/zoo.py --sample 60   60 of them, drawn by a fixed seed: a check of a change
    python tests/models/zoo/zoo.py --discover    make catalogue.json anew: which models can be built here
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import resource
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]
os.environ["ASCEND_LN_FUSE_STRICT"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask whether there is a GPU must not spoil a fork

import catalogue  # noqa: E402
import discover  # noqa: E402
import measure  # noqa: E402
import torch  # noqa: E402
from pages import made_with, write_section  # noqa: E402

from ascend_ln_fuse.across import NOT_INNERMOST  # noqa: E402

VERSIONED = ("torch", "transformers", "diffusers")
LIBRARIES = ("transformers", "diffusers")
#: what a worker may take
SECONDS, BYTES = 180, 10 << 30
#: of the norm sites of a library, this share is to be fused
WANTED_SHARE = 0.9

Task = tuple[str, str]  # name, dtype
Job = Callable[..., dict]


# -- workers: a process a model, so that one that crashes takes nothing along


def _work(job: Job, task: tuple, answer: Connection) -> None:
    """Run a job and send its result; in a process of its own."""
    if not torch.cuda.is_available():  # (CUDA reserves more addresses than that)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), \
            contextlib.redirect_stderr(nowhere):
        result = job(*task)
    answer.send(result)


def _measured(name: str, dtype: str, device: str) -> dict:
    try:
        return measure.measure(name, getattr(torch, dtype), device).to_dict()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return measure.Result(name, dtype, problem=f"{type(error).__name__}: {text}").to_dict()


def _discovered(name: str) -> dict:
    return {"name": name, **discover.discover(name)}


@dataclass
class _Running:
    process: multiprocessing.process.BaseProcess
    task: tuple
    deadline: float


def run_all(job: Job, tasks: Iterable[tuple], jobs: int) -> Iterator[tuple[tuple, dict | str]]:
    """(task, result) of each task as they end; a worker that dies gives the reason in a result's place."""
    context = multiprocessing.get_context("forkserver")
    waiting, running = deque(tasks), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = context.Pipe(duplex=False)
                task = waiting.popleft()
                process = context.Process(target=_work, args=(job, task, theirs))
                process.start()
                theirs.close()
                running[ours] = _Running(process, task, time.monotonic() + SECONDS)
            first = min(one.deadline for one in running.values())
            ready = wait(running, timeout=max(0, first - time.monotonic()))
            late = [c for c, x in running.items() if c not in ready and time.monotonic() >= x.deadline]
            for connection in (*ready, *late):
                one = running.pop(connection)
                if connection in late:
                    result = f"took more than {SECONDS} s"
                else:
                    try:
                        result = connection.recv()
                    except EOFError:
                        one.process.join()
                        result = f"the process ended with {one.process.exitcode}"
                one.process.kill()
                one.process.join()
                connection.close()
                yield one.task, result
    finally:
        for one in running.values():
            one.process.kill()


# -- results, kept from run to run


def version_key(device: str) -> str:
    """What results depend on: device, versions, the package's source, the zoo's and the bound's."""
    digest = hashlib.sha256(device.encode())
    for name in VERSIONED:
        digest.update(f"{name} {importlib.metadata.version(name)}".encode())
    files = [p for folder in ("fusion_pass", "patterns", "kernels") for p in (ROOT / folder).rglob("*.py")]
    ours = (*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.glob("*.json"))
    files += [*(p for p in ours if not p.name.startswith("test_")), ROOT / "tests" / "checks.py"]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def read_results(path: Path, key: str) -> dict[Task, dict]:
    """The results of this version in a file of JSON lines; a line that was cut off is passed over."""
    found: dict[Task, dict] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["key"] == key:
                    found[entry["name"], entry["dtype"]] = entry
    return found


def tasks(only: str, sample: int | None = None) -> list[Task]:
    """fp32 for all models, and bf16 for the third that tests take; `sample`: so many of these."""
    names = [name for name in catalogue.names() if only in name]
    found = [(name, "float32") for name in names] + \
        [(name, "bfloat16") for name in names if catalogue.in_test_run(name)]
    return found if sample is None else sorted(random.Random(0).sample(found, min(sample, len(found))))


# -- tables


def print_table(results: list[dict]) -> None:
    """Model, norm sites, fused, declined by reason, error."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("model", "dtype", "sites", "fused", "declined, missed or wrong", "error", box=None)
    for r in results:
        notes = [escape(f"{count} x {why}") for why, count in r["declined"].items()]
        notes += [f"no site: {', '.join(r['missed'])}"] if r["missed"] else []
        notes += [escape(r["skipped"])] if r["skipped"] else []
        notes += [f"[red]{escape(r['problem'])}[/red]"] if r["problem"] else []
        table.add_row(r["name"], r["dtype"], str(r["sites"]), str(r["fused"]), "\n".join(notes),
                      f"{r['error']:.2f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def share(results: Iterable[dict]) -> float:
    """Of all norm sites, those fused."""
    results = list(results)
    return sum(r["fused"] for r in results) / max(1, sum(r["sites"] for r in results))


def summary(results: list[dict]) -> str:
    """What docs/reliability.md shows."""
    fp32 = [r for r in results if r["dtype"] == "float32"]
    parts = [_by_library(results), _declines(fp32)]
    parts += _problems(results)
    fallbacks = sum(len(r["fallbacks"]) for r in results)
    parts.append(f"Sites that fell back to plain PyTorch while they ran: {fallbacks}.")
    if skipped := [r for r in results if r["skipped"]]:
        words = ", ".join(f"{r['name']} ({r['dtype']}; {r['skipped'].partition(':')[0]})" for r in skipped)
        parts.append(f"Models that eager or Dynamo itself, whatever the backend, does not run: {words}.")
    others = Counter(r["reference"] for r in results if r["reference"] not in ("", "float64"))
    counts = "; ".join(f"{what}: {n} models" for what, n in others.items())
    parts.append("References other than float64, where that does not run or takes another way (another "
                 f"expert, another draw): {counts}.")
    parts.append(_left_out())
    parts.append(f"Made by `make zoo` with {made_with(*VERSIONED)}.")
    return "\n\n".join(parts)


def sample_summary(results: list[dict], count: int) -> str:
    """The same of `count` models."""
    parts = [_by_library(results), *_problems(results)]
    parts.append(f"Made by `make zoo ARGS=\"--sample {count}\"` with {made_with(*VERSIONED)}.")
    return "\n\n".join(parts)


def _problems(results: list[dict]) -> list[str]:
    """A paragraph each: norms that no report names, models that are wrong."""
    parts = []
    if missed := [r for r in results if r["dtype"] == "float32" and r["missed"]]:
        count = sum(len(r["missed"]) for r in missed)
        parts.append(f"Norm modules that no report names: {count}, in {_listed(missed)}.")
    if wrong := [r for r in results if r["problem"]]:
        parts.append("\n".join(f"- **{r['name']}** ({r['dtype']}): {r['problem'][:200]}" for r in wrong))
    return parts


def _by_library(results: list[dict]) -> str:
    lines = ["| library | dtype | models | as eager | with norms | norm sites | fused | share | error |",
             "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for library in LIBRARIES:
        for dtype in ("float32", "bfloat16"):
            rows = [r for r in results if r["name"].startswith(library + "/") and r["dtype"] == dtype]
            if rows:
                good = [r for r in rows if not r["problem"] and not r["skipped"]]
                counts = (len(rows), len(good), sum(r["sites"] > 0 for r in rows),
                          sum(r["sites"] for r in rows), sum(r["fused"] for r in rows))
                worst = max((r["error"] for r in good), default=0)
                lines.append(f"| {library} | {dtype} | " + " | ".join(map(str, counts)) +
                             f" | {share(rows):.1%} | {worst:.2f} |")
    return "\n".join(lines) + """

As eager: nothing is raised, each output is within the bound, and structure, dtypes, strides and the number of
graphs are eager's. Error: the largest share of what is allowed; eager's own error is 0.50 of it."""


def _declines(results: list[dict]) -> str:
    reasons: Counter = Counter()
    for r in results:
        for why, count in r["declined"].items():
            reasons[_general(why)] += count
    lines = ["Norm sites that are not fused (float32), by reason:", "", "| reason | sites | models |",
             "|---|--:|---|"]
    for why, count in reasons.most_common():
        rows = [r for r in results if why in map(_general, r["declined"])]
        lines.append(f"| {why} | {count} | {_listed(rows)} |")
    return "\n".join(lines)


def _left_out() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in sorted(catalogue.left_out().items()):
        by_reason.setdefault(why.partition(":")[0], []).append(name.partition("/")[2])
    lines = [f"- {why} ({len(names)}): {', '.join(names)}"
             for why, names in sorted(by_reason.items(), key=lambda pair: -len(pair[1]))]
    return f"Left out, {len(catalogue.left_out())} architectures, by reason:\n\n" + "\n".join(lines)


def _general(why: str) -> str:
    """A reason, without what it says of one tensor."""
    return NOT_INNERMOST if why.startswith(NOT_INNERMOST) else why


def _listed(rows: Iterable[dict], most: int = 6) -> str:
    names = [r["name"].partition("/")[2] for r in rows]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- commands


def discover_all(jobs: int) -> None:
    """Write catalogue.json."""
    names = catalogue.every_name()
    built: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for (name,), result in _tracked(run_all(_discovered, [(name,) for name in names], jobs), len(names)):
        if isinstance(result, dict) and "built" in result:
            built[name] = result["built"]
        else:
            left_out[name] = result if isinstance(result, str) else result["left out"]
    data = {"built": dict(sorted(built.items())), "left out": dict(sorted(left_out.items()))}
    catalogue.CATALOGUE.write_text(_json(data), encoding="utf-8")
    print(f"{len(built)} of {len(names)} architectures can be built")


def _json(data: dict[str, dict[str, Any]]) -> str:
    """A line an entry."""
    parts = []
    for key, entries in data.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
        parts.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _tracked(items: Iterable, total: int) -> Iterable:
    from rich.progress import track

    return track(items, "models", total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--sample", type=int, metavar="N", help="N of the models, the same each time")
    parser.add_argument("--device", default="cpu", help="cuda or npu: the kernels themselves; default: cpu")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "zoo.jsonl",
                        help="where results are kept; those of other versions are passed over")
    parser.add_argument("--write", action="store_true", help="write the summary into docs/reliability.md")
    parser.add_argument("--discover", action="store_true", help="make catalogue.json anew")
    args = parser.parse_args()
    # Workers are forked from a process that has imported all, which takes longer than most models.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:2], os.environ.get("PYTHONPATH")]))
    multiprocessing.set_forkserver_preload(["discover", "measure", "diffusers_models", "transformers_models"])
    if args.discover:
        discover_all(args.jobs)
        return
    key = version_key(args.device)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    found = read_results(args.results, key)
    wanted = tasks(args.only, args.sample)
    todo = [task for task in wanted if task not in found]
    with args.results.open("a", encoding="utf-8") as file:
        file.write("\n" if todo else "")  # after a line that was cut off
        given = [(*task, args.device) for task in todo]
        for (*task, _), result in _tracked(run_all(_measured, given, args.jobs), len(todo)):
            task = tuple(task)
            if isinstance(result, str):
                result = measure.Result(*task, problem=result).to_dict()
            found[task] = {"key": key, **result}
            file.write(json.dumps(found[task]) + "\n")
            file.flush()
    results = [found[task] for task in wanted]
    print_table(results)
    text = summary(results) if args.sample is None else sample_summary(results, args.sample)
    print(text)
    if args.write:
        write_section("reliability.md", "zoo" if args.sample is None else "zoo sample", text)
    enough = args.only or args.sample or \
        all(share(r for r in results if r["name"].startswith(x)) >= WANTED_SHARE for x in LIBRARIES)
    bad = any(r["problem"] or r["missed"] or r["fallbacks"] for r in results)
    sys.exit(bad or not enough)


if __name__ == "__main__":
    main()
