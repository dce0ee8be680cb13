"""The mutants that no test can tell are lines of today's source; the sample is drawn as it says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.mutants.excuses import Excuse, changed_lines, excused, excuses
from tools.mutants.reach import Reach, function_at
from tools.mutants.tree import Experience

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """from __future__ import annotations
def f(x: int | None = 3) -> int | None:
    sync(x)
    return x + 1 if x == 2 else None
"""


@pytest.mark.parametrize("excuse", excuses(), ids=lambda e: f"{Path(e.path).stem}-{e.mutant[:40]}")
def test_an_excuse_is_of_a_line_that_the_source_has(excuse: Excuse) -> None:
    """If this fails, the line has changed: remove the entry, or look whether it still holds."""
    lines = " ".join(line.strip() for line in (ROOT / excuse.path).read_text(encoding="utf-8").splitlines())
    assert excuse.line in lines
    assert excuse.mutant != excuse.line and len(excuse.why.split()) > 3


def test_a_diff_is_excused_by_its_lines_only() -> None:
    diff = "--- a\n+++ b\n@@ -1 +1 @@\n context\n-    a = 1\n+    a = 2\n"
    assert changed_lines(diff) == ("a = 1", "a = 2")
    assert excused("kvfs/none.py", diff) is None


def test_tests_that_noticed_bugs_of_a_module_come_first(tmp_path: Path) -> None:
    known = Experience(tmp_path / "tests.json", {"tests/a/test_m.py::slow": 9.0, "tests/a/test_x.py::fast": 0.1})
    ranked = sorted(known.seconds, key=lambda test: known.rank("kvfs/a/m.py", test))
    assert ranked[0] == "tests/a/test_m.py::slow", "a test named for the module"
    known.noticed["kvfs/a/m.py"] = Counter({"tests/a/test_x.py::fast": 1})
    known.save()
    known = Experience.load(known.path)
    assert min(known.seconds, key=lambda test: known.rank("kvfs/a/m.py", test)) == "tests/a/test_x.py::fast"


def test_a_sample_is_the_same_for_a_seed_and_leaves_annotations_out(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed (pip install -e .[mutants])")
    from tools.mutants import sample

    module = tmp_path / "kvfs" / "write" / "m.py"
    module.parent.mkdir(parents=True)
    module.write_text(SOURCE)
    places = sample.places_of(module)
    operators = {change.operator_name for changes in places.values() for change in changes}
    assert "kvfs/DropCall" in operators and "core/ReplaceComparisonOperator_Eq_NotEq" in operators
    assert not any("Operator_BitOr_" in name for name in operators), "a union of types in an annotation"
    assert "core/ReplaceComparisonOperator_Eq_Is" not in operators and sample.CONTROL not in operators
    first, second = (sample.draw(tmp_path, ["write"], 4, seed=5) for _ in range(2))
    assert first == second and len(first) == 4


RUN = """
import sys
from pathlib import Path
from tools.mutants.tree import ToolError, Tree
tree = Tree(Path("folder"))  # relative, as `make mutants` names it
(tree.root / "tests").mkdir(parents=True)
(tree.root / "tests" / "test_one.py").write_text("import one\\n\\ndef test_one():\\n    assert one.ONE == 1\\n")
(tree.root / "one.py").write_text("ONE = 1\\n")
try:
    exec(sys.argv[1])
except ToolError as exc:
    print("ToolError", exc)
"""


def run_in_a_small_tree(tmp_path: Path, code: str) -> str:
    """What ``code`` prints in a process of its own: a tree ends all children of its process."""
    command = [sys.executable, "-c", RUN, code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_folder_may_be_named_relative_to_the_current_directory(tmp_path: Path) -> None:
    code = """
print(tree.run(["tests"], "one.py").noticed)
with tree.changed("one.py", "ONE = 2\\n"):
    print(tree.run(["tests"], "one.py").by)
"""
    assert run_in_a_small_tree(tmp_path, code).split() == ["False", "tests/test_one.py::test_one"]


def test_a_mutant_is_not_noticed_by_a_run_that_could_not_begin(tmp_path: Path) -> None:
    code = 'tree.root.rename("elsewhere"); tree.run(["tests"], "one.py")'
    assert "ToolError the tests could not be run (exit status 70)" in run_in_a_small_tree(tmp_path, code)


def test_a_mutant_is_asked_of_the_tests_that_run_its_function(tmp_path: Path) -> None:
    source = "A = 1\n\ndef f(a=1):\n    def g():\n        return a\n    return g()\n\n@property\ndef h(): return 1\n"
    assert [function_at(source, line) for line in range(1, 10)] == ["", "", "f", "f", "f", "f", "", "h", "h"]
    assert function_at("class C:\n    a = 1\n    def f(self):\n        return 1\n", 4) == "C.f"
    functions = {"kvfs/m.py:f": ["b", "a"], "kvfs/m.py:h": ["c"], "kvfs/n.py:f": ["d"]}
    Reach(tmp_path / "reach.json", {"tests/test_a.py": "digest"}, functions).save()
    reach = Reach.load(tmp_path / "reach.json")
    assert reach.of("kvfs/m.py", source, 5) == ["b", "a"]
    assert reach.of("kvfs/m.py", source, 1) == ["a", "b", "c"], "a line of the module: all that run anything of it"


def test_a_run_without_a_mutant_notes_what_the_tests_run_in_any_thread(tmp_path: Path) -> None:
    code = """
(tree.root / "kvfs").mkdir()
(tree.root / "kvfs" / "__init__.py").write_text("")
(tree.root / "kvfs" / "m.py").write_text("def f():\\n    return 1\\n\\ndef g():\\n    return 2\\n")
one = ["import threading", "from kvfs import m", "def test_one():", "    assert m.f() == 1", "def test_two():"]
two = ["    thread = threading.Thread(target=m.g)", "    thread.start()", "    thread.join()"]
(tree.root / "tests" / "test_one.py").write_text("\\n".join(one + two))
tree.run(["tests/test_one.py"], learn=True)
for line in (2, 5):
    print(*tree.reach.of("kvfs/m.py", (tree.root / "kvfs" / "m.py").read_text(), line))
"""
    assert run_in_a_small_tree(tmp_path, code).split() == ["tests/test_one.py::test_one", "tests/test_one.py::test_two"]


def test_tests_of_all_packages_are_learnt_file_by_file_until_the_time_is_over(tmp_path: Path) -> None:
    code = """
import time
from tools.mutants.__main__ import learn
for name in ("write/test_near.py", "crash/test_far.py", "crash/test_slow.py"):
    file = tree.root / "tests" / name
    file.parent.mkdir(exist_ok=True)
    mark = "import pytest\\npytestmark = pytest.mark.slow\\n" if "slow" in name else ""
    file.write_text(mark + "def test_it():\\n    pass\\n")
print(learn(tree, 0.0), [*tree.reach.files])
print(learn(tree, time.monotonic() + 100.0))
tree = Tree(Path("folder"))
(tree.root / "tests" / "write" / "test_near.py").write_text("def test_that(): pass")
print(learn(tree, time.monotonic() + 100.0))
print([*tree.known.seconds])
print([*tree.reach.files])
"""
    printed = run_in_a_small_tree(tmp_path, code).splitlines()
    files = ["tests/write/test_near.py", "tests/crash/test_far.py", "tests/crash/test_slow.py"]
    assert printed[0] == "False []"
    assert printed.count("True") == 2 and printed[-1] == repr(files)
    assert sum("1 tests without a mutant" in line for line in printed) == 3, "a file that has changed is learnt again"
    tests = ["tests/crash/test_far.py::test_it", "tests/write/test_near.py::test_that"]
    assert printed[-2] == repr(tests)


def test_a_run_without_a_mutant_of_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    code = 'tree.run(["tests/test_none.py"], learn=True)'
    assert "ToolError the tests could not be run" in run_in_a_small_tree(tmp_path, code)


SAME = """import os
from dataclasses import dataclass
from typing import overload
@overload
def f(x): ...
@property
def f(x):
    return [*zip(x, x, strict=True)]
@dataclass(frozen=True, repr=False)
class A:
    a = os.O_RDONLY | os.O_DIRECT
b = os.O_RDWR | f(1)
"""


def test_what_no_run_can_tell_is_left_out_of_a_sample(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed (pip install -e .[mutants])")
    from tools.mutants import sample

    (tmp_path / "m.py").write_text(SAME)
    changes = [change for found in sample.places_of(tmp_path / "m.py").values() for change in found]
    at = [(c.start_pos[0], c.operator_name.removeprefix("core/")) for c in changes]
    assert {row for row, name in at if name == "RemoveDecorator"} == {6, 9}, "not the overload"
    assert [row for row, name in at if name == "ReplaceTrueWithFalse"] == [], "neither strict nor frozen"
    assert [row for row, name in at if name == "ReplaceFalseWithTrue"] == [9], "repr is not an assertion"
    assert {row for row, name in at if name.endswith("BitOr_Add")} == {12}, "flags have distinct bits"
    assert {row for row, name in at if name.endswith("BitOr_BitAnd")} == {11, 12}


@pytest.mark.parametrize(
    ("line", "reached", "asked"),
    [
        (4, ["tests/write/test_m.py::a", "tests/cli/test_x.py::b"], [["tests/cli/test_x.py", "tests/write/test_m.py"]]),
        (4, [], [["tests/write", "tests/test_namespace.py"]]),
        (1, ["tests/write/test_m.py::a"], [["tests/write/test_m.py"]]),
        (1, [], [["tests/write", "tests/test_namespace.py"]]),
    ],
    ids=["reached", "not reached", "a module's own line", "one of a module without functions"],
)
def test_which_tests_a_mutant_is_asked_of(
    tmp_path: Path, line: int, reached: list[str], asked: list[list[str]]
) -> None:
    from tools.mutants.__main__ import judge
    from tools.mutants.tree import Verdict

    for name in ("tests/write/test_m.py", "tests/test_namespace.py", "kvfs/write/m.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("A = 1\n\ndef f():\n    return A\n")
    seen: list[list[str]] = []

    def run(tests: list[str], module: str, **how: object) -> Verdict:
        seen.append(list(tests))
        return Verdict(False, "", frozenset(), 1.0)

    tree: Any = SimpleNamespace(
        root=tmp_path, known=Experience(tmp_path / "tests.json"), run=run,
        reach=Reach(tmp_path / "reach.json", {}, {"kvfs/write/m.py:f": reached}),
        changed=lambda name, text: contextlib.nullcontext(),
    )  # fmt: skip
    assert not judge(tree, tmp_path / "kvfs" / "write" / "m.py", "", line).noticed
    assert seen == asked


def test_what_is_noted_of_a_file_replaces_what_was_noted_before(tmp_path: Path) -> None:
    reach = Reach(tmp_path / "reach.json", {}, {"m.py:f": ["a.py::old", "b.py::one"]})
    reach.note("a.py", "digest", {"m.py:f": ["a.py::new"], "m.py:g": ["a.py::new"]})
    assert Reach.load(reach.path).functions == {"m.py:f": ["b.py::one", "a.py::new"], "m.py:g": ["a.py::new"]}
    assert Reach.load(reach.path).files == {"a.py": "digest"}
    known = Experience(tmp_path / "tests.json", {"a.py::old": 1.0, "b.py::one": 2.0}, {}, ["a.py::old", "b.py::one"])
    known.learn("a.py", {"a.py::new": 3.0}, [])
    assert known.seconds == {"b.py::one": 2.0, "a.py::new": 3.0} and known.failing == ["b.py::one"]


CAUGHT = """import os
try:
    pass
except os.error:
    pass
except (KeyError, os.error):
    pass
except ValueError:
    pass
except:
    pass
"""


def test_every_exception_of_a_sample_can_be_replaced(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed (pip install -e .[mutants])")
    from tools.mutants import sample
    from tools.mutants.__main__ import mutated

    (tmp_path / "m.py").write_text(CAUGHT)
    changes = [change for found in sample.places_of(tmp_path / "m.py").values() for change in found]
    replaced = [change for change in changes if change.operator_name == "core/ExceptionReplacer"]
    assert [change.start_pos[0] for change in replaced] == [6, 8]
    for change, line in zip(
        replaced, ("except (CosmicRayTestingException, os.error):", "except CosmicRayTestingException:"), strict=True
    ):
        assert line in mutated(change).splitlines()
