"""A rank's own worker processes get what exists only in its __main__."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[1]

# A rank: a fresh __main__ without a file, in which a cell is run; ``print`` ran once per process that ran the cell.
RANK = """
import json, linecache, os, sys, types
from air_magic.workers import teach_multiprocessing

teach_multiprocessing()
text, method = json.loads(sys.argv[1])
linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.method = method
exec(compile(text, "<cell>", "exec"), vars(main))
"""


def rank(folder, cell, method):
    """What the cell prints in a rank, as JSON."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    argument = json.dumps([dedent(cell), method])
    # From a file: what `spawn` would run again in a worker if __main__ still had it.
    script = folder / "rank_script.py"
    script.write_text(RANK)
    done = subprocess.run([sys.executable, script, argument], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pool_takes_notebook_functions_and_gives_notebook_classes(tmp_path, method):
    """Functions go to workers, objects come back as their own class, errors with their source lines."""
    cell = """
        import json, multiprocessing, sys, traceback
        print('"cell"')

        SCALE = 3

        class Point:
            def __init__(self, x):
                self.x = x

        def scaled(x):
            return Point(SCALE * x)

        def make():
            class Local:
                pass
            return Local

        Local = make()

        def local(x):
            return Local()

        def failing(x):
            raise ValueError(x)

        with multiprocessing.get_context(method).Pool(1) as pool:
            points = pool.map(scaled, [1, 2]) + pool.map(scaled, [3])
            own = pool.map(lambda point: type(point) is Point, points)
            locals_ = pool.map(local, [1])
            try:
                pool.map(failing, [1])
            except ValueError as error:
                text = str(error.__cause__)
        print(json.dumps({
            "points": [point.x for point in points],
            "class": all(type(point) is Point for point in points),
            "own": own,
            "local": type(locals_[0]).__qualname__,
            "line": 'File "<cell>"' in text and "raise ValueError(x)" in text,
        }))
        """
    assert rank(tmp_path, cell, method) == [
        "cell",
        {"points": [3, 6, 9], "class": True, "own": [True] * 3, "local": "make.<locals>.Local", "line": True},
    ]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_dataloader_takes_notebook_datasets(tmp_path, method):
    """Dataset, collate function and batch class of a cell work with two workers; tensors still go by shared memory."""
    cell = """
        import json, torch
        print('"cell"')

        class Batch:
            def __init__(self, items):
                self.data = torch.stack(items)

        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.tensor(float(index)) ** 2

        def make():
            class Cubes(Squares):
                def __getitem__(self, index):
                    return super().__getitem__(index) * index
            return Cubes

        def load(dataset):
            loader = torch.utils.data.DataLoader(
                dataset, batch_size=2, num_workers=2, collate_fn=Batch, multiprocessing_context=method,
                worker_init_fn=lambda worker: None,
            )
            return list(loader)

        squares = load(Squares())
        cubes = load(make()()) if method == "fork" else []
        print(json.dumps([
            [batch.data.tolist() for batch in squares + cubes],
            all(type(batch) is Batch for batch in squares + cubes),
            squares[0].data.is_shared(),
        ]))
        """
    cubes = [[0.0, 1.0], [8.0, 27.0]] if method == "fork" else []
    assert rank(tmp_path, cell, method) == ["cell", [[[0.0, 1.0], [4.0, 9.0], *cubes], True, True]]


@pytest.mark.parametrize("chosen", [None, "spawn"])
@pytest.mark.parametrize("version", [(3, 13), (3, 14)])
def test_start_method_is_pinned_from_python_314(version, chosen):
    """Its default breaks classes of cells; what was chosen stays."""
    code = f"""
        import multiprocessing
        from air_magic.workers import teach_multiprocessing
        if {chosen!r}:
            multiprocessing.set_start_method({chosen!r})
        teach_multiprocessing({version})
        print(multiprocessing.get_start_method(allow_none=True))
        """
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", dedent(code)], env=environ, capture_output=True, text=True, check=True)
    pinned = "fork" if version >= (3, 14) else None
    assert done.stdout.strip() == str(chosen or pinned)
