"""when_imported: a callback right after a module's first import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from air_magic.imports import when_imported


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Writes the module ``watched_package.watched``, which is forgotten afterwards."""
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").touch()
    finders, path = list(sys.meta_path), list(sys.path)
    sys.path.insert(0, str(tmp_path))

    def write(code: str) -> None:
        (package / "watched.py").write_text(code)
        importlib.invalidate_caches()

    yield write
    assert sys.meta_path == finders
    sys.path[:] = path
    for name in ("watched_package", "watched_package.watched"):
        sys.modules.pop(name, None)


def test_the_callback_comes_after_the_modules_own_code(module: Callable[[str], None]) -> None:
    """Once, in the import, before the importer's next line; to wait for it imports nothing."""
    module("value = 1")
    seen: list[tuple[str, int]] = []

    def patch(found: ModuleType) -> None:
        seen.append((found.__name__, found.value))
        found.value = 2

    when_imported("watched_package.watched", patch)
    assert "watched_package" not in sys.modules
    from watched_package.watched import value

    importlib.import_module("watched_package.watched")
    assert (seen, value) == ([("watched_package.watched", 1)], 2)


def test_a_module_that_is_there_is_given_at_once() -> None:
    """No import will come for it."""
    seen: list[ModuleType] = []
    when_imported("json", seen.append)
    assert seen == [importlib.import_module("json")]


def test_two_may_wait_for_one_module(module: Callable[[str], None]) -> None:
    """Both are called."""
    module("")
    seen: list[str] = []
    when_imported("watched_package.watched", lambda _: seen.append("first"))
    when_imported("watched_package.watched", lambda _: seen.append("second"))
    importlib.import_module("watched_package.watched")
    assert sorted(seen) == ["first", "second"]


def test_to_look_for_a_module_is_not_to_import_it(module: Callable[[str], None]) -> None:
    """As libraries do that use another one if it is there."""
    module("")
    seen: list[ModuleType] = []
    when_imported("watched_package.watched", seen.append)
    assert importlib.util.find_spec("watched_package.watched") is not None
    assert seen == []
    importlib.import_module("watched_package.watched")
    assert len(seen) == 1


def test_an_import_that_fails_may_be_tried_again(module: Callable[[str], None]) -> None:
    """It fails as it would have without us, and the callback comes when it succeeds."""
    module("1 / 0")
    seen: list[ModuleType] = []
    when_imported("watched_package.watched", seen.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("watched_package.watched")
    assert seen == []
    module("repaired = True")
    importlib.import_module("watched_package.watched")
    assert len(seen) == 1


def test_a_module_that_does_not_exist_stays_missing() -> None:
    """Its import fails as ever."""
    finders = list(sys.meta_path)
    when_imported("no_such_module_anywhere", lambda _: None)
    try:
        with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module_anywhere'"):
            importlib.import_module("no_such_module_anywhere")
    finally:
        sys.meta_path[:] = finders
