"""Cache directories that are read-only, full, somebody else's, or that others can write to."""

import errno
import json
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ascend_ln_fuse.kernels import directories, store, triton_cache
from ascend_ln_fuse.kernels.store import Store

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
NOBODY = 65534


@pytest.fixture
def cache(tmp_path) -> Path:
    """Where stores of this test lie."""
    return tmp_path / "cache"


@pytest.fixture
def become_another(monkeypatch):
    """A function after which this process is somebody else, as far as it can tell."""
    user = os.geteuid()
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def entry_of(cache: Path, name="tiles") -> Path:
    (path,) = (cache / name).iterdir()
    return path


# -- who can write to a directory


def test_a_directory_of_ones_own(tmp_path):
    assert directories.distrust(tmp_path) == "" == directories.distrust(tmp_path / "not" / "there yet")
    directories.make(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700 == \
        stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode)


@pytest.mark.parametrize("mode, words", [(0o777, "everybody"), (0o1777, "everybody"), (0o702, "everybody")])
def test_writable_by_others(mode, words, tmp_path):
    """Sticky or not: others could make what we would read, and what is on the way they could rename."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    assert words in directories.distrust(shared)
    below = shared / "mine"
    below.mkdir(mode=0o700)
    assert bool(directories.distrust(below)) is not bool(mode & stat.S_ISVTX)


def test_writable_by_a_group(tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    monkeypatch.setattr(directories, "_group_of_one", lambda group: False)
    assert "its group" in directories.distrust(tmp_path)
    monkeypatch.setattr(directories, "_group_of_one", lambda group: True)
    assert directories.distrust(tmp_path) == ""


def test_a_group_of_one(monkeypatch):
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    user = pwd.struct_passwd(("ann", "x", 7, 70, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: user)
    for name, members, one in (("ann", [], True), ("ann", ["ann"], True), ("ann", ["bob"], False),
                               ("users", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda g, e=(name, "x", 70, members): grp.struct_group(e))
        assert directories._group_of_one(70) is one
    assert not directories._group_of_one(71)


def test_belongs_to_another(tmp_path, become_another):
    become_another()
    assert "belongs to user" in directories.distrust(tmp_path)


@pytest.mark.skipif(not ROOT, reason="only root can give a directory away")
def test_really_belongs_to_another(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    assert f"belongs to user {NOBODY}" in directories.distrust(theirs)
    assert f"belongs to user {NOBODY}" in directories.distrust(theirs / "mine")


def test_links(tmp_path):
    """A link of one's own is followed, and what it leads to is looked at."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        (tmp_path / f"to {folder.name}").symlink_to(folder)
    bad.chmod(0o777)
    assert directories.distrust(tmp_path / "to good" / "below") == ""
    assert "everybody" in directories.distrust(tmp_path / "to bad" / "below")
    assert "everybody" in directories.distrust(tmp_path / "to bad")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "symbolic links" in directories.distrust(tmp_path / "loop")


def test_entries(tmp_path):
    (tmp_path / "kernel").mkdir()
    assert directories.distrust(tmp_path, entries=True) == ""
    (tmp_path / "link").symlink_to("/")
    assert "symbolic link" in directories.distrust(tmp_path, entries=True)
    (tmp_path / "link").unlink()
    (tmp_path / "kernel").chmod(0o777)
    assert directories.distrust(tmp_path) == ""
    assert "everybody" in directories.distrust(tmp_path, entries=True)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    assert "no directory" in directories.distrust(tmp_path / "file")


@pytest.mark.parametrize("xdg", ["", "relative", "absolute"])
def test_where_files_are_kept(xdg, monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_LN_FUSE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path) if xdg == "absolute" else xdg)
    home = tmp_path if xdg == "absolute" else tmp_path / "home" / ".cache"
    assert directories.cache_directory() == home / "ascend_ln_fuse"


# -- the store


def test_what_was_put(cache):
    tiles = Store("tiles")
    assert not cache.exists() and tiles.get("a") is None
    tiles.put("a", {"rows": 64, "words": ["é", None, 1.5]})
    tiles.put("a", {"rows": 32, "words": ["é", None, 1.5]})
    for each in (tiles, Store("tiles")):
        assert each.get("a") == {"rows": 32, "words": ["é", None, 1.5]}
    assert Store("other").get("a") is None
    found = tiles.get("a")
    found["rows"] = 0
    assert tiles.get("a")["rows"] == 32
    assert stat.S_IMODE(entry_of(cache).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("key, value, error", [
    (1, {}, TypeError), ("a", [1], TypeError), ("a", {"x": object()}, TypeError),
    ("a", {"x": float("nan")}, ValueError), ("a", {"x": "y" * store.MAX_BYTES}, ValueError),
], ids=["key", "list", "object", "nan", "large"])
def test_what_cannot_be_put(key, value, error):
    tiles = Store("tiles")
    with pytest.raises(error):
        tiles.put(key, value)
    assert tiles.get("a") is None


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".", "a b"])
def test_names(name):
    with pytest.raises(ValueError, match="plain word"):
        Store(name)


class _Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb went off",)


def _entry(**changes) -> bytes:
    return json.dumps({"format": store.FORMAT, "key": "a", "value": {"rows": 1}, **changes}).encode()


DAMAGED = {
    "empty": b"", "half": _entry()[:25], "not text": b"\xff\xfe\x00", "not JSON": b"rows = 1",
    "a list": b"[1]", "a number": b"1", "deep": b"[" * 60_000, "long number": b"1" * 60_000,
    "NaN": _entry(value={"rows": 1}).replace(b"1}", b"NaN}"), "another key": _entry(key="b"),
    "another format": _entry(format=99), "no object": _entry(value=[1]), "pickle": pickle.dumps(_Bomb()),
    "large": _entry(value={"x": "y" * store.MAX_BYTES}),
}


@pytest.mark.fault("files in the cache that are truncated, damaged, of another program, or hostile",
                   "ignored, and written anew; nothing is unpickled or executed")
@pytest.mark.parametrize("kind", sorted(DAMAGED))
def test_damaged_files(kind, cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Store("tiles").put("a", {"rows": 64})
    entry_of(cache).write_bytes(DAMAGED[kind])
    tiles = Store("tiles")
    assert tiles.get("a") is None
    tiles.put("a", {"rows": 32})
    assert Store("tiles").get("a") == {"rows": 32}
    assert not Path("bomb went off").exists()


@pytest.mark.fault("links, pipes and folders in the place of files in the cache", "ignored")
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file(kind, cache, tmp_path, monkeypatch):
    Store("tiles").put("a", {"rows": 64})
    path = entry_of(cache)
    text = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(text)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    tiles = Store("tiles")
    assert tiles.get("a") is None
    tiles.put("a", {"rows": 32})
    assert tiles.get("a") == {"rows": 32}
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == text


@pytest.mark.fault("a cache directory of another user, or that others can write to",
                   "not read; entries live in memory; one warning")
@pytest.mark.parametrize("how", ["another", "everybody"])
def test_a_folder_that_is_not_trusted(how, cache, become_another, warned):
    Store("tiles").put("a", {"rows": 64})
    if how == "another":
        become_another()
    else:
        (cache / "tiles").chmod(0o777)
    store._unusable.cache_clear()
    tiles = Store("tiles")
    assert tiles.get("a") is None
    tiles.put("b", {"rows": 1})
    assert tiles.get("b") == {"rows": 1} and Store("tiles").get("b") is None
    (text,) = warned()
    assert "in memory only" in text and str(cache) in text


def test_a_file_of_another_user(cache, monkeypatch):
    Store("tiles").put("a", {"rows": 64})
    original = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result(
        [*original(fd)[:4], original(fd).st_uid + 1, *original(fd)[5:]]))
    assert Store("tiles").get("a") is None


@pytest.mark.fault("a cache on a disk that is full or read-only", "entries live in memory")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["open", "replace"])
def test_a_disk_that_takes_nothing(code, step, cache, monkeypatch):
    Store("tiles").put("a", {"rows": 64})
    original = getattr(os, step)

    def refuse(path, *args, **kwargs):
        if step == "open" and not args[0] & os.O_CREAT:
            return original(path, *args, **kwargs)
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, step, refuse)
    tiles = Store("tiles")
    tiles.put("b", {"rows": 1})
    tiles.put("a", {"rows": 2})
    assert tiles.get("b") == {"rows": 1} and tiles.get("a") == {"rows": 2}
    assert Store("tiles").get("a") == {"rows": 64}
    assert len(os.listdir(cache / "tiles")) == 1, "a half-written file was left"


READ_ONLY = """
import os, sys, warnings
from ascend_ln_fuse.kernels import launch  # all imports, before this user may read nothing
from ascend_ln_fuse.kernels.store import Store
if os.geteuid() == 0:
    os.seteuid(65534)
warnings.simplefilter("error")
tiles = Store("tiles")
try:
    tiles.get("a")
except RuntimeWarning as warning:
    assert "Permission denied" in str(warning), warning
else:
    raise AssertionError("no warning")
tiles.put("a", {"rows": 1})
assert tiles.get("a") == {"rows": 1}
"""


def test_a_folder_without_the_right_to_write():
    """With the system's own refusal: as another user than root, who may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o500)
        if ROOT:
            os.chown(folder, NOBODY, NOBODY)
        done = subprocess.run([sys.executable, "-c", READ_ONLY], capture_output=True, text=True, timeout=120,
                              env={**os.environ, "ASCEND_LN_FUSE_CACHE_DIR": f"{folder}/cache"})
        assert done.returncode == 0, done.stderr


def test_a_store_has_a_size(cache, monkeypatch):
    monkeypatch.setattr(store, "MAX_FILES", 8)
    tiles = Store("tiles")
    for i in range(40):
        tiles.put(str(i), {"i": i})
        os.utime(max((cache / "tiles").iterdir(), key=lambda p: p.stat().st_mtime_ns), (i, i))
        assert len(os.listdir(cache / "tiles")) <= 8 and len(tiles._entries) <= 8
    assert Store("tiles").get("39") == {"i": 39} and Store("tiles").get("0") is None


def test_files_of_others_are_left_alone(cache, monkeypatch):
    """The directory may be one that the user keeps other things in."""
    monkeypatch.setattr(store, "MAX_FILES", 8)
    (cache / "tiles").mkdir(mode=0o700, parents=True)
    others = [cache / "tiles" / name for n in range(20)
              for name in (f"photo_{n}.png", f"{n:031x}.json", f"x{n:032x}.json")]
    for path in others:
        path.write_text("mine")
        os.utime(path, (1, 1))
    tiles = Store("tiles")
    for i in range(40):
        tiles.put(str(i), {"i": i})
    assert all(path.read_text() == "mine" for path in others)
    assert len(os.listdir(cache / "tiles")) <= len(others) + 8


HAMMER = """
import sys
from ascend_ln_fuse.kernels.store import Store
for n in range(300):
    tiles = Store("tiles")
    key = str(n % 7)
    tiles.put(key, {"key": key, "by": sys.argv[1], "filler": "x" * (n * 50)})
    found = Store("tiles").get(key)
    assert found and found["key"] == key and set(found["filler"]) <= {"x"}, found
"""


@pytest.mark.fault("two processes that share the cache", "every read finds a whole entry")
def test_two_processes(cache):
    processes = [subprocess.Popen([sys.executable, "-c", HAMMER, name], stderr=subprocess.PIPE, text=True)
                 for name in "ab"]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(os.listdir(cache / "tiles")) == 7


# -- Triton's cache


@pytest.fixture
def triton_dir(monkeypatch, tmp_path) -> Path:
    path = tmp_path / "triton"
    monkeypatch.setenv(triton_cache.VARIABLE, str(path))
    return path


def used() -> str:
    """The directory in which Triton would now keep a kernel."""
    from triton.runtime.cache import FileCacheManager

    return os.path.dirname(FileCacheManager("key").cache_dir)


def test_triton_keeps_its_directory(triton_dir, warned):
    assert triton_cache.with_safe_cache(used) == str(triton_dir) == used() == triton_cache.current()
    assert not warned()


def test_triton_has_a_directory_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv(triton_cache.VARIABLE, raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert triton_cache.current() == used() == str(tmp_path / ".triton" / "cache")


@pytest.mark.fault("Triton's cache of another user, or that others can write to (it holds code)",
                   "nothing of it is loaded: kernels are compiled into a temporary directory; one warning")
@pytest.mark.parametrize("how", ["another", "everybody", "entry", "link", "parent"])
def test_triton_does_not_use_what_others_can_write(how, triton_dir, become_another, warned, tmp_path):
    (triton_dir / "kernel").mkdir(parents=True)
    if how == "another":
        become_another()
    elif how == "link":
        (triton_dir / "trap").symlink_to(tmp_path)
    else:
        {"everybody": triton_dir, "entry": triton_dir / "kernel", "parent": tmp_path}[how].chmod(0o777)
    for _ in range(2):
        inside = triton_cache.with_safe_cache(used)
        assert inside != str(triton_dir) and stat.S_IMODE(os.stat(inside).st_mode) == 0o700
        assert used() == str(triton_dir), "other users of Triton keep their directory"
    (text,) = warned()
    assert "Triton's cache is not used" in text
    tmp_path.chmod(0o700)


@pytest.mark.fault("Triton's cache on a disk that is full or read-only",
                   "kernels are compiled into a temporary directory; one warning")
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_triton_on_a_disk_that_takes_nothing(when, code, triton_dir, monkeypatch, warned):
    full = OSError(code, os.strerror(code))
    calls = []

    def work():
        calls.append(used())
        if calls[-1] == str(triton_dir):
            raise RuntimeError("cannot compile") from full
        return "compiled"

    if when == "before":
        def probe(dir):
            raise full

        monkeypatch.setattr(tempfile, "TemporaryFile", probe)
    assert [triton_cache.with_safe_cache(work) for _ in range(2)] == ["compiled"] * 2
    assert len(calls) == (2 if when == "before" else 3) and len(warned()) == 1
    assert used() == str(triton_dir)


def test_other_errors_are_not_the_disks(triton_dir, warned):
    calls = []

    def work():
        calls.append(1)
        raise RuntimeError("ptxas died")

    with pytest.raises(RuntimeError, match="ptxas died"):
        triton_cache.with_safe_cache(work)
    assert len(calls) == 1 and not warned()


def test_a_directory_set_in_python_is_seen(monkeypatch, triton_dir, tmp_path, warned):
    """Triton 3.4 and later: a program may set `triton.knobs.cache.dir`, which goes before the variable."""
    cache = type("cache_knobs", (), {})()
    cache.dir = str(tmp_path / "by knob")
    monkeypatch.setitem(sys.modules, "triton.knobs", type("knobs", (), {"cache": cache}))
    assert triton_cache.current() == cache.dir
    os.mkdir(cache.dir)
    os.chmod(cache.dir, 0o777)
    inside = triton_cache.with_safe_cache(lambda: (cache.dir, os.environ[triton_cache.VARIABLE]))
    assert inside[0] == inside[1] != str(tmp_path / "by knob")
    assert len(warned()) == 1
    assert cache.dir == str(tmp_path / "by knob") and os.environ[triton_cache.VARIABLE] == str(triton_dir)


def test_threads_share_the_temporary_directory(triton_dir, warned):
    triton_dir.mkdir()
    triton_dir.chmod(0o777)
    seen, barrier = [], threading.Barrier(4)

    def work():
        barrier.wait(30)
        seen.append(used())

    threads = [threading.Thread(target=triton_cache.with_safe_cache, args=(work,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 4 and len(set(seen)) == 1 and seen[0] != str(triton_dir)
    assert os.environ[triton_cache.VARIABLE] == str(triton_dir)
