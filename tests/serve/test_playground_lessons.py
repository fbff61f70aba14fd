"""Lessons over HTTP: what they are, their cells run by the server, answers to exercises."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from heedful.cli import main
from heedful.lessons import read_lesson
from heedful.lessons.results import keep_results, kept_results, results_file
from heedful.serve.options import Options
from heedful.serve.playground import lesson_process
from heedful.serve.playground.docs import has_documentation
from support.playground import response_models, validated
from support.sample_lesson import CHILD, lessons_in
from support.serving import PATIENCE, ThreadServer, assert_error, events, serving


@pytest.fixture(scope="module", autouse=True)
def child() -> Iterator[None]:
    """The check of the sample is in the child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson_process, "COMMAND", (sys.executable, "-c", CHILD))
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[ThreadServer]:
    with lessons_in(tmp_path_factory.mktemp("lessons")), serving("tiny") as found:
        yield found


def test_the_list_and_a_lesson(page):
    listed = validated("GET", "/api/lessons", page.get("/api/lessons").content)
    (summary,) = listed["lessons"]
    assert summary == {
        "name": "sample", "title": "A sample", "chapter": "Before Transformers", "about": "a lesson of the tests",
        "n_exercises": 1, "models": ["tiny"],
    }  # fmt: skip
    found = validated("GET", "/api/lessons/{name}", page.get("/api/lessons/sample").content)
    assert found.items() >= summary.items() and found["exercises"] == ["doubled_in_tests"]
    kinds = [part["kind"] for part in found["parts"]]
    assert kinds == ["text", "code", "text", "code", "view", "text", "code", "code", "code", "text", "question", "text"]
    assert found["parts"][6]["tags"] == ["exercise"]


@pytest.mark.parametrize("name", ["nothing", "..", "%2e%2e%2flesson", "..%2f..%2f..%2fREADME", "sample.md", "a%00b"])
def test_another_name_is_not_found(page, name):
    assert_error(page.get(f"/api/lessons/{name}"), 404)


# --- the lesson's own cells -------------------------------------------------------------------------------------------


def lesson_of(*cells: str) -> str:
    """A lesson of these cells."""
    text = "".join(f"```{{code-cell}} python\n{cell}\n```\n" for cell in cells)
    return f"---\ntitle: T\nchapter: C\norder: 1\nabout: a\n---\n# T\n{text}"


def run_lesson(page: ThreadServer, name: str) -> list[dict[str, Any]]:
    with page.http.stream("POST", f"/api/lessons/{name}/run") as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        found = events(b"".join(response.iter_raw()))
    for event in found:
        response_models()["POST", "/api/lessons/{name}/run"].validate_python(event, strict=True)
    return found


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "heedful" / "lessons"


def test_a_lesson_is_run_once_and_then_kept(page, cache, monkeypatch):
    found = run_lesson(page, "sample")
    *shown, end = found
    assert end == {"done": True, "error": ""}
    assert [(event["cell"], event["text"], event["error"]) for event in shown] == [
        (1, "hello from the cell\n", ""),
        (3, "", ""),
        (8, "42\n", ""),  # the exercise is left out, the solution shows nothing
    ]
    (picture,) = shown[1]["figures"]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    (file,) = cache.iterdir()
    assert file.name.startswith("sample.")
    monkeypatch.setattr(lesson_process, "COMMAND", ("nothing-to-run",))
    assert run_lesson(page, "sample") == found


@pytest.mark.parametrize("damage", ["", "{", "[]\n", '{"n": 0}\n{"n": 1}\n', '{"cell": "x"}\n{"n": 1}\n', "\0" * 50])
def test_damaged_results_are_made_anew(cache, tmp_path, damage):
    with lessons_in(tmp_path / "lessons"):
        lesson = read_lesson("sample")
        events = [{"cell": 1, "text": "x", "figures": [], "error": ""}]
        keep_results(lesson, events)
        assert kept_results(lesson) == events
        results_file(lesson).write_text(damage)
        assert kept_results(lesson) is None
        keep_results(lesson, events)
        assert kept_results(lesson) == events


def test_results_of_another_version_of_a_lesson_are_replaced(cache, tmp_path):
    for text in ("1", "2"):
        with lessons_in(tmp_path / "lessons", sample=lesson_of(text)):
            assert kept_results(read_lesson("sample")) is None
            keep_results(read_lesson("sample"), [])
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    tmp_path.joinpath("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with lessons_in(tmp_path / "lessons"):
        keep_results(read_lesson("sample"), [])
        assert kept_results(read_lesson("sample")) is None


def test_cells_that_fail_print_too_much_or_never_end(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_process, "LESSON_SECONDS", 4)
    cells = ["print('x' * 10**8)", "1 / 0", "import os; os.write(1, b'not json')", "2 + 2", "while True: pass"]
    with lessons_in(tmp_path / "lessons", bad=lesson_of(*cells)), serving("tiny") as page:
        *shown, end = run_lesson(page, "bad")
    assert len(shown[0]["text"]) < 101_000 and "99,900,001 more characters" in shown[0]["text"]
    assert "ZeroDivisionError" in shown[1]["error"] and shown[3]["text"] == "4\n"
    assert end["done"] and "stopped after 4 seconds" in end["error"]
    assert not cache.exists()  # what has failed is not kept


def test_the_cells_stop_when_the_client_disconnects(cache, tmp_path):
    """With all that they have started."""
    mark = tmp_path / "pids"
    fork = f"import os, pathlib\nif os.fork(): pathlib.Path({str(mark)!r}).write_text(f'{{os.getpid()}}')"
    cells = [fork, "import time", "while True: time.sleep(0.1)"]
    with lessons_in(tmp_path / "lessons", endless=lesson_of(*cells)), serving("tiny") as page:
        sock = page.open("/api/lessons/endless/run", {})
        wait_for(lambda: mark.exists() and mark.read_text())
        group = os.getpgid(int(mark.read_text()))
        assert group != os.getpgid(0)
        sock.close()
        wait_for(lambda: not group_alive(group))
        assert page.get("/health").status_code == 200


def test_the_cells_stop_with_the_server(cache, tmp_path):
    mark = tmp_path / "pid"
    cell = f"import os, pathlib\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\nwhile True: pass"
    server = f"""
import asyncio, os, pathlib, sys
from heedful.serve.playground.lesson_process import LessonProcesses

async def main():
    async with LessonProcesses().lesson([{{"cell": 0, "source": {cell!r}, "shown": True}}]) as events:
        while not pathlib.Path({str(mark)!r}).exists():
            await asyncio.sleep(0.01)
        os._exit(0)  # as if it were killed

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", server], check=True)
    wait_for(lambda: not group_alive(int(mark.read_text())))


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def group_alive(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    return any(
        process.info["status"] != psutil.STATUS_ZOMBIE and group_of(process.pid) == group
        for process in psutil.process_iter(["status"])
    )


def group_of(number: int) -> int | None:
    try:
        return os.getpgid(number)
    except ProcessLookupError:
        return None


# --- answers to exercises ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def school(tmp_path_factory) -> Iterator[ThreadServer]:
    """A server that runs answers."""
    with lessons_in(tmp_path_factory.mktemp("lessons")), serving("tiny") as found:
        yield found


def answer(school: ThreadServer, source: str, exercise: str = "doubled_in_tests") -> dict[str, Any]:
    response = school.post("/api/lessons/sample/check", {"exercise": exercise, "source": source})
    assert response.status_code == 200, response.text
    return validated("POST", "/api/lessons/{name}/check", response.content)


def body_of(statement: str) -> str:
    return f"def doubled_in_tests(x):\n    {statement}\n\ncheck(doubled_in_tests)"


# What an answer must not do, and what it is told: all in one answer, since a process takes seconds to start.
FORBIDDEN = {
    "os.fork()": "starts no other processes",
    "subprocess.run(['true'])": "starts no other processes",
    "os.system('true')": "starts no other processes",
    "open('/tmp/of-an-answer', 'w')": "changes no files",
    "open('here', 'w')": "changes no files",
    "os.remove('/etc/hostname')": "changes no files",
    "os.rename('/etc/hostname', 'here')": "changes no files",
    "os.chmod('/etc/hostname', 0o600)": "changes no files",
    "os.kill(os.getppid(), 0)": "ends no other processes",
    "socket.socket()": "opens no connections",
    "[0] * 10**10": "MemoryError",
    "os.environ['HEEDFUL_API_KEY']": "KeyError",
    "os.environ['OF_THE_SERVER']": "KeyError",
}
TRYING = """
import os, socket, subprocess
for code in {codes!r}:
    try:
        eval(code)
        print("allowed", code)
    except Exception as problem:
        print(type(problem).__name__, problem)
assert open("/etc/passwd").read()
print("x" * 10**8)

def doubled_in_tests(x):
    return half(4 * x) + 0 * SIZE * math.pi

check(doubled_in_tests)
"""


def test_an_answer_is_checked_and_does_no_harm(school, tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_API_KEY", "secret")
    monkeypatch.setenv("OF_THE_SERVER", "secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = answer(school, TRYING.format(codes=list(FORBIDDEN)))
    lines = found["text"].splitlines()
    assert found["right"] and lines[-1] == "✓ doubled_in_tests: right", found["text"][-500:]
    for (code, said), line in zip(FORBIDDEN.items(), lines, strict=False):
        assert said in line, code
    assert len(found["text"]) < 101_000 and "more characters" in lines[-2]
    assert list(tmp_path.iterdir()) == []  # its folder is gone
    assert not Path("/tmp/of-an-answer").exists()


# The same past Python's own hooks: through the C library, as an answer can call it. Each is the number that it returns.
IN_C = """
import ctypes, os, platform, threading
libc = ctypes.CDLL(None, use_errno=True)
server, call = os.getppid(), libc.syscall
call.restype = ctypes.c_long
ours = {folder!r}.encode()
x86 = platform.machine() == "x86_64"
tried = {{
    "kill": lambda: libc.kill(server, 0),
    "kill all": lambda: libc.kill(-1, 0),
    "tgkill": lambda: call(234 if x86 else 131, server, server, 0),
    "tkill": lambda: call(200 if x86 else 130, server, 0),
    "sigqueue": lambda: libc.sigqueue(server, 0, None),
    "pidfd_open": lambda: call(434, server, 0),
    "ptrace": lambda: libc.ptrace(16, server, 0, 0),
    "setpriority": lambda: libc.setpriority(0, server, 19),
    "prlimit": lambda: libc.prlimit(server, 0, bytes(16), None),
    "signals of a file": lambda: libc.fcntl(0, 8, server),
    "fork": lambda: libc.fork(),
    "vfork": lambda: call(58 if x86 else 220, 17, 0, 0, 0, 0),
    "clone3": lambda: call(435, bytes(88), 88),
    "exec": lambda: libc.execv(b"/bin/true", (ctypes.c_char_p * 2)(b"true", None)),
    "spawn": lambda: -libc.posix_spawn(None, b"/bin/true", None, None, (ctypes.c_char_p * 2)(b"true", None), None),
    "open": lambda: libc.open(ours + b"/new", os.O_CREAT | os.O_WRONLY, 0o600),
    "append": lambda: libc.open(ours + b"/file", os.O_WRONLY | os.O_APPEND),
    "read and write": lambda: libc.open(ours + b"/file", os.O_RDWR),
    "openat2": lambda: call(437, -100, ours + b"/file", (ctypes.c_uint64 * 3)(1, 0, 0), 24),
    "in its own folder": lambda: libc.open(b"here", os.O_CREAT | os.O_WRONLY, 0o600),
    "truncate": lambda: libc.truncate(ours + b"/file", 0),
    "unlink": lambda: libc.unlink(ours + b"/file"),
    "rename": lambda: libc.rename(ours + b"/file", ours + b"/other"),
    "mkdir": lambda: libc.mkdir(ours + b"/folder", 0o700),
    "symlink": lambda: libc.symlink(b"file", ours + b"/link"),
    "link": lambda: libc.link(ours + b"/file", ours + b"/link"),
    "chmod": lambda: libc.chmod(ours + b"/file", 0o777),
    "utime": lambda: libc.utimes(ours + b"/file", None),
    "memory of its own": lambda: libc.open(b"/proc/self/mem", os.O_RDWR),
    "io_uring": lambda: call(425, 1, bytes(120)),
    "socket": lambda: libc.socket(2, 1, 0),
    "local socket": lambda: libc.socket(1, 1, 0),
    "shared memory": lambda: libc.shmget(1, 1, 0o1600),
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", ours, b"tmpfs", 0, None),
    "no limits": lambda: libc.setrlimit(9, (ctypes.c_uint64 * 2)(2**64 - 1, 2**64 - 1)),
    "setuid": lambda: libc.setuid(12345) + libc.setuid(0),
    "of a thread": lambda: in_thread(lambda: libc.kill(server, 0)),
}}

def in_thread(do):
    results = []
    thread = threading.Thread(target=lambda: results.append(do()))
    thread.start()
    thread.join()
    return results[0]

for name, attempt in tried.items():
    print(name, "refused" if attempt() < 0 else "ALLOWED")
for path in "environ", "mem", "fd/0":
    file = libc.open(f"/proc/{{server}}/{{path}}".encode(), os.O_RDONLY)
    print(path, "refused" if file < 0 or (libc.lseek(file, 2**22, 0), os.read(file, 1))[1] is None else "ALLOWED")

def doubled_in_tests(x):
    return 2 * x

check(doubled_in_tests)
"""


def kernel_sandbox() -> dict[str, bool]:
    """What of it this system has, tried by a process of its own."""
    code = "import json; from heedful.lessons.sandbox import confine_process; print(json.dumps(confine_process()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_an_answer_does_no_harm_through_the_c_library_either(school, tmp_path):
    has = kernel_sandbox()
    if not has["seccomp"]:
        pytest.skip("this system has no seccomp filters: see SECURITY.md")
    tmp_path.joinpath("file").write_text("as it was")
    before = tmp_path.joinpath("file").stat()
    found = answer(school, IN_C.format(folder=str(tmp_path)))
    assert found["right"], found["text"]
    lines = found["text"].splitlines()[:-1]
    inspecting = {"environ ALLOWED", "mem ALLOWED", "fd/0 ALLOWED"} if not has["landlock"] else set()
    assert {line for line in lines if line.endswith("ALLOWED")} <= inspecting and len(lines) > 40
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert tmp_path.joinpath("file").stat() == before and tmp_path.joinpath("file").read_text() == "as it was"


def test_seccomp_holds_where_landlock_does_not(tmp_path):
    """An older kernel, or threads that began before."""
    code = f"""
import threading, ctypes, os
from heedful.lessons import sandbox
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert not sandbox.confine_process()["landlock"]
libc = ctypes.CDLL(None)
print(libc.open({str(tmp_path / "new")!r}.encode(), 0o101, 0o600), libc.fork(), libc.kill(os.getppid(), 0))
"""
    if not kernel_sandbox()["seccomp"]:
        pytest.skip("this system has no seccomp filters: see SECURITY.md")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == ["-1", "-1", "-1"] and not list(tmp_path.iterdir())


def test_what_an_answer_writes_to_the_server_is_not_believed(school):
    for forged in ("'[' * 100_000", "'{'", "'[]'", '\'{"right": 1, "text": []}\'', "'{\"event\": 1}'"):
        source = (
            "import os\nfor number in range(3, 64):\n    try:\n"
            f"        os.write(number, ({forged}).encode() + b'\\n')\n    except OSError:\n        pass\n"
            "os._exit(0)"
        )
        assert not answer(school, source)["right"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (body_of("return x"), "✗ doubled_in_tests: twice 2 is 4, not 2\n"),
        (body_of("while True: print('x' * 10**6)"), "stopped after 3 seconds"),
        ("import os; os._exit(0)", "ended without a word"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(school, monkeypatch, source, said):
    monkeypatch.setattr(lesson_process, "ANSWER_SECONDS", 3)
    found = answer(school, source)
    assert not found["right"] and said in found["text"], found["text"][-2000:]


def test_a_wrong_question_is_refused(school):
    source = body_of("return 2 * x")
    path = "/api/lessons/sample/check"
    assert_error(school.post(path, {"exercise": "half", "source": source}), 400, param="exercise")
    assert_error(school.post(path, {"exercise": "doubled_in_tests", "source": "x" * 20_001}), 400, param="source")
    assert_error(school.post(path, {"exercise": "doubled_in_tests"}), 400, param="source")
    assert_error(school.post("/api/lessons/../check", {"exercise": "x", "source": source}), 404)
    assert_error(school.post("/api/lessons/other/check", {"exercise": "x", "source": source}), 404)


def test_answers_are_run_on_this_machine_alone_unless_that_was_asked_for(school, tmp_path):
    assert school.get("/api/lessons").json()["exercises"] is True
    assert Options().may_run_answers and Options(exercises=True, host="0.0.0.0").may_run_answers
    assert not Options(exercises=False).may_run_answers and not Options(host="0.0.0.0").may_run_answers
    with lessons_in(tmp_path), serving("tiny", exercises=False) as page:
        told = page.get("/api/lessons").json()
        body = {"exercise": "doubled_in_tests", "source": "x = 1"}
        said = assert_error(page.post("/api/lessons/sample/check", body), 403, code="exercises_not_allowed")
    assert told["exercises"] is False and "--exercises" in told["reason"]
    assert told["command"].endswith("heedful learn NAME --page")
    assert told["documentation"] == has_documentation()
    assert "heedful learn NAME --page" in said
    with pytest.raises(ValueError, match="--exercises runs Python code"):
        Options(exercises=True, host="0.0.0.0").check_exercises()
    Options(exercises=True, host="0.0.0.0", api_keys=("k",)).check_exercises()
    Options(exercises=True).check_exercises()
    assert main(["serve", "tiny", "--exercises", "--host", "0.0.0.0", "--port", "0"]) == 2


def test_few_may_wait(school, monkeypatch):
    monkeypatch.setattr(lesson_process, "MAX_WAITING", 0)
    body = {"exercise": "doubled_in_tests", "source": "x = 1"}
    for path in ("run", "check"):
        assert_error(school.post(f"/api/lessons/sample/{path}", body), 429)


def test_an_answer_stops_when_the_client_disconnects(school):
    body = {"exercise": "doubled_in_tests", "source": body_of("while True: pass")}
    sock = school.open("/api/lessons/sample/check", body)
    processes = school.app.state.lesson_processes
    wait_for(lambda: processes._places["answer"].locked())
    sock.close()
    wait_for(lambda: not processes._places["answer"].locked())
    assert answer(school, body_of("return 2 * x"))["right"]
