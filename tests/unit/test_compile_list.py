"""deploy/compile.py: its list of modules and the copy it compiles."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "compile.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as if it were run
    spec = spec_from_file_location("compile_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_exists_and_is_named_once(script: ModuleType) -> None:
    paths = script.module_paths()
    assert len(paths) == len(set(paths)) > 40
    assert "gateway/proxy/exchange.py" in paths


def test_a_module_that_is_gone_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MODULES", ("gateway/proxy/{exchange,gone}",))
    with pytest.raises(FileNotFoundError, match=r"gateway/proxy/gone\.py"):
        script.module_paths()


def test_the_copy_has_no_extensions_and_no_leftovers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, tree = tmp_path / "root", tmp_path / "tree"
    for path in ("gateway/__init__.py", "gateway/a.so", "gateway/__pycache__/a.pyc", "README.md"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("", encoding="utf-8")
    (tree / "gateway").mkdir(parents=True)
    for path in ("gateway/gone.py", "old__mypyc.so"):
        (tree / path).write_text("", encoding="utf-8")
    monkeypatch.setattr(script, "ROOT", root)
    monkeypatch.setattr(script, "TREE", tree)
    script.copy_tree()
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()) == [
        "README.md",
        "gateway/__init__.py",
    ]
