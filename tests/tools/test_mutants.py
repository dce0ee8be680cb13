"""The mutants that no test can tell are lines of today's source; the sample is drawn as it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools.mutants.excuses import Excuse, changed_lines, excused, excuses
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
