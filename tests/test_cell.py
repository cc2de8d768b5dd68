"""One cell as what a script under torchrun would be."""

import builtins
import collections
import json
import linecache
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from air_magic.cell import Cell
from air_magic.errors import CaptureError
from air_magic.names import Unbound


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A shell of this process that stands for the notebook's."""
    config = Config()
    config.HistoryManager.enabled = False
    main, display = sys.modules["__main__"], getattr(builtins, "display", None)
    shell = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    shell.register_magic_function(lambda line, cell: _run_here(shell, line, cell), "cell", "distributed")
    yield shell
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main
    del builtins.__IPYTHON__
    if display is None:
        del builtins.display


def _run_here(shell, line, body):
    """Stands for a run of one rank."""
    shell.parsed = Cell.parse(body, line=line, shell=shell)
    return _value(shell.parsed)


def _value(cell, namespace=None):
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    module_code, value_code = cell.exec_parts()
    exec(module_code, namespace)
    return None if value_code is None else eval(value_code, namespace)


def parse(shell, body, line="-n 2"):
    return Cell.parse(textwrap.dedent(body), line=line, shell=shell)


def shown(shell, capsys, cell):
    """What the notebook shows for a cell."""
    shell.run_cell(cell, store_history=True)
    captured = capsys.readouterr()
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.out + captured.err)


def run_script(text, tmp_path, *arguments):
    path = tmp_path / "train.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, path, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")},
    )
    assert done.stderr == ""
    assert not (tmp_path / "ipython").exists()
    return done.stdout


# --- parsing


def test_a_cell_called_by_code_is_put_together_again(notebook):
    """Without a running cell the text is what the user would have typed."""
    cell = parse(notebook, "x = 1\nx\n", "-n 2 --name 'a b'")
    assert cell == Cell(
        source="# %%distributed -n 2 --name 'a b'\nx = 1\nx\n",
        filename=cell.filename,
        text="%%distributed -n 2 --name 'a b'\nx = 1\nx\n",
        number=notebook.execution_count,
        needs_shell=False,
    )
    assert notebook.compile.format_code_name(cell.filename) == ("Cell", f"In[{cell.number}]")
    assert pickle.loads(pickle.dumps(cell)) == cell


@pytest.mark.parametrize(
    ("text", "lineno"),
    [
        ("%%distributed -n 2\nmark = 1", 2),
        ("%%distributed\n\n\n  \nmark = 1\n\n", 5),
        ("%%distributed   -n  2  \n# comment\nmark = 1", 3),
        ("\n\n%%distributed -n 2\nmark = 1", 4),
        ("%%time\n%%distributed -n 2\nmark = 1", 3),
        ("%%distributed -n 2\n    if 1:\n        mark = 1", 3),
        ("%%distributed -n 2\n'''\nlong'''\nmark = 1", 4),
        ("%%distributed -n 2\nimport sys\nx = !echo 1\nmark = 1", 4),
    ],
)
def test_lines_are_numbered_as_in_the_notebooks_cell(notebook, capsys, text, lineno):
    """Whatever stands above the body."""
    notebook.parsed = None
    number = notebook.execution_count
    shown(notebook, capsys, text)
    cell = notebook.parsed
    assert (cell.text.rstrip(), cell.number) == (text.rstrip(), number)
    assert cell.source.splitlines()[lineno - 1].strip() == "mark = 1"
    assert linecache.getline(cell.filename, lineno).strip() == "mark = 1"


def test_a_traceback_names_the_cell_its_line_and_shows_it(notebook, capsys):
    """As for any cell."""
    number = notebook.execution_count
    text = shown(notebook, capsys, "%%distributed -n 2\n\ndef f():\n    return 1 / 0\n\nf()")
    assert f"Cell In[{number}], line 6\n" in text
    assert "----> 6 f()" in text
    assert f"Cell In[{number}], line 4, in f()" in text
    assert "----> 4     return 1 / 0" in text


def test_a_syntax_error_is_shown_at_its_place(notebook, capsys):
    """The line of the notebook's cell, and the caret below the second `=`."""
    number = notebook.execution_count
    text = shown(notebook, capsys, "%%distributed -n 2\n\nx = 1\nyy = = 2")
    assert text.rstrip().endswith(f"Cell In[{number}], line 4\n    yy = = 2\n         ^\nSyntaxError: invalid syntax")


def test_an_indentation_error_is_shown_at_its_place(notebook, capsys):
    """As for any cell."""
    number = notebook.execution_count
    text = shown(notebook, capsys, "%%distributed -n 2\nif 1:\nx = 2")
    assert f"Cell In[{number}], line 3\n    x = 2\n    ^\nIndentationError: expected an indented block" in text


@pytest.mark.parametrize("body", ["await f()", "async with a: pass", "[x async for x in a]", "async for x in a: pass"])
def test_await_outside_a_function_is_explained(notebook, body):
    """A notebook allows it, a script does not."""
    with pytest.raises(SyntaxError, match=r"outside .*function; a rank runs the cell like a script: .*asyncio\.run"):
        parse(notebook, f"x = 1\n{body}\n")


def test_an_await_in_a_plain_function_is_an_ordinary_mistake(notebook):
    """Nothing to explain."""
    with pytest.raises(SyntaxError, match=r"^'await' outside async function \("):
        parse(notebook, "def f():\n    await g()\n")


# --- the value


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = 1", None),
        ("1 + 1", 2),
        ("x = 1\nx + 1  # comment\n\n", 2),
        ("1 + 1;", None),
        ("1 + 1 ; # comment\n", None),
        ("'a;'", "a;"),
        ("(1 +\n 1)", 2),
        ("(1 +\n 1);", None),
        ("x = 1; x", 1),
        ("if True:\n    1", None),
        ("'docstring'", "docstring"),
        ("'docstring'\n__doc__", "docstring"),
        ("# only a comment", None),
        ("from __future__ import annotations\ndef f(x: Missing): ...\nf.__annotations__", {"x": "Missing"}),
        ("from __future__ import annotations\n(lambda: 3)()", 3),
        ("__name__", "__main__"),
        ("[y := 1, y]", [1, 1]),
    ],
)
def test_the_value_is_the_last_expression(notebook, body, expected):
    """And nothing if it ends in a semicolon."""
    assert _value(parse(notebook, body)) == expected


def test_future_imports_apply_to_both_parts_and_come_from_the_cell_only(notebook):
    """The notebook's own future imports are not a script's."""
    notebook.run_cell("from __future__ import annotations")
    here, there = (
        parse(notebook, f"{text}def f(x: int): ...\nf.__annotations__['x']")
        for text in ("", "from __future__ import annotations\n")
    )
    assert (_value(here), _value(there)) == (int, "int")
    assert there.exec_parts()[1].co_flags & __import__("__future__").annotations.compiler_flag


def test_a_rank_learns_the_source(notebook):
    """Tracebacks and `inspect` read linecache."""
    cell = parse(notebook, "import inspect\ndef f():\n    return 1\ninspect.getsource(f)")
    linecache.cache.pop(cell.filename)
    assert _value(cell) == "def f():\n    return 1\n"


def test_a_syntax_warning_is_shown_by_parse_and_not_again_by_ranks(notebook, recwarn):
    """One warning, not one per rank."""
    cell = parse(notebook, "x = 1\nx is 1")
    assert [(str(each.message)[:4], each.lineno) for each in recwarn] == [('"is"', 3)]
    recwarn.clear()
    cell.exec_parts()
    cell.check({}, [])
    cell.export()
    assert list(recwarn) == []


# --- magics


def test_shell_syntax_needs_a_shell(notebook):
    """So that a rank without it makes none."""
    bodies = ["!ls", "x = !ls", "%env", "x = %env", "get_ipython()", "x = 1", "'get_ipython()'", "# !ls"]
    assert [parse(notebook, f"y = 1\n{body}\n").needs_shell for body in bodies] == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    "magic",
    [
        "%cd /",
        "%env A=3",
        "%time x = 1",
        "%timeit 1",
        "%pip list",
        "%ls",
        "%pwd",
        "%matplotlib agg",
        "%run a.py",
        "!!ls",
    ],
)
def test_a_magic_that_needs_only_a_process_is_accepted(notebook, magic):
    """No false alarm."""
    assert parse(notebook, f"if 1:\n    {magic}\n").needs_shell


REFUSED = {
    "%nosuch 1": "%nosuch (line 3) is no line magic of this notebook: correct its name.",
    "x = %nosuch": "%nosuch (line 3) is no line magic of this notebook: correct its name.",
    "%mine 1": "%mine (line 3) comes from an_extension.magics, which a rank does not load: call its functions instead.",
    "%short": "%short (line 3) is an alias of this notebook: write `!echo %s`.",
    "%matplotlib inline": "%matplotlib inline (line 3) needs the notebook's page: use `%matplotlib agg`, and save figures.",
    "%load_ext autoreload": "%load_ext autoreload (line 3) is of no use: leave it out, every rank imports modules afresh.",
    "%%time": "%%time (line 3) is a cell magic: put it above the %%distributed line.",
}
NEED_THE_SESSION = (
    "debug pdb history hist recall rerun macro edit load load_ext reload_ext pastebin save notebook gui who whos "
    "reset xmode pylab logstart alias pinfo"
).split()
REFUSED |= {
    f"%{name}": f"%{name} (line 3) needs the notebook's session or page: run it in a cell without %%distributed."
    for name in NEED_THE_SESSION
}


@pytest.mark.parametrize(("magic", "message"), REFUSED.items())
def test_a_magic_that_no_rank_has_is_refused(notebook, magic, message):
    """Before anything starts: which, where, why, what instead."""

    def mine(line): ...

    mine.__module__ = "an_extension.magics"
    notebook.register_magic_function(mine, "line", "mine")
    notebook.alias_manager.define_alias("short", "echo %s")
    with pytest.raises(CaptureError) as caught:
        parse(notebook, f"x = 1\n{magic}\n")
    assert str(caught.value) == message


def test_a_cell_magic_at_the_top_of_the_body_is_refused(notebook):
    """IPython would run it in the rank, around the code that shall be seen."""
    with pytest.raises(
        CaptureError, match=r"^%%time \(line 4\) is a cell magic: put it above the %%distributed line.$"
    ):
        parse(notebook, "\n\n%%time\nx = 1\n")


def test_all_refused_magics_are_named_at_once(notebook):
    """One try, one correction."""
    with pytest.raises(CaptureError) as caught:
        parse(notebook, "%debug\nif 1:\n    %who\n%env\n")
    assert [line.split(" needs ")[0] for line in str(caught.value).splitlines()] == ["%debug (line 2)", "%who (line 4)"]


# --- names


class SimpleMLP: ...


NAMESPACE = {
    "SimpleMLP": SimpleMLP,
    "cfg": {},
    "cp": collections,
    "json": json,
    "OD": collections.OrderedDict,
    "pi": 3.1,
}
SimpleMLP.__module__ = "__main__"
INTRO = "this cell runs in a fresh namespace, like a script; it does not know"


def test_free_names_are_in_the_notebook_or_nowhere(notebook):
    """What IPython provides is neither."""
    cell = parse(notebook, "display(cfg)\nget_ipython()\nSimpleMLP, nowhere, len\n")
    assert cell.free(NAMESPACE) == ([Unbound("cfg", 2), Unbound("SimpleMLP", 4)], [Unbound("nowhere", 4)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "\nSimpleMLP()\ncfg['lr']",
            f"{INTRO} SimpleMLP (line 3: class), cfg (line 4: dict) from the notebook."
            " Add `--with SimpleMLP,cfg` to the %%distributed line, or define them in the cell.",
        ),
        (
            "def f():\n    return pi",
            f"{INTRO} pi (line 3: float) from the notebook."
            " Add `--with pi` to the %%distributed line, or define it in the cell.",
        ),
        (
            "cp.Counter\njson.loads, OD",
            f"{INTRO} cp (line 2: module), OD (line 3: class), json (line 3: module) from the notebook. Import in the"
            " cell: `import collections as cp; from collections import OrderedDict as OD; import json`.",
        ),
        ("lerning_rate", "`lerning_rate` (line 2) is defined nowhere."),
        ("a\nb", "`a` (line 2), `b` (line 3) are defined nowhere."),
        (
            "json\ncfg\nnowhere",
            f"{INTRO} json (line 2: module), cfg (line 3: dict) from the notebook. Import in the cell: `import json`."
            " Add `--with cfg` to the %%distributed line, or define it in the cell.\n"
            "`nowhere` (line 4) is defined nowhere.",
        ),
        (
            "cfg = dict(cfg)",
            f"{INTRO} cfg (line 2: dict) from the notebook."
            " Add `--with cfg` to the %%distributed line, or define it in the cell.",
        ),
        (
            "from nowhere_to_be import *\nlinear\ncfg",
            f"{INTRO} cfg (line 4: dict) from the notebook."
            " Add `--with cfg` to the %%distributed line, or define it in the cell.",
        ),
    ],
)
def test_all_missing_names_are_refused_at_once(notebook, body, message):
    """With the flag or the import that gives them."""
    with pytest.raises(CaptureError) as caught:
        parse(notebook, body).check(NAMESPACE, [])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "body",
    [
        "cfg, SimpleMLP",
        "import json\njson",
        "from math import *\nprint(pi)",
        "exec('x = 1')\nx",
        "%time y = 1\ny",
        "%run other.py\nz",
        "display(1)\n!ls",
        "print(__file__, __name__)",
        "try:\n    amp\nexcept NameError:\n    amp = False",
    ],
)
def test_a_cell_that_has_all_its_names_passes(notebook, body):
    """No false alarm."""
    parse(notebook, body).check(NAMESPACE, ["cfg", "SimpleMLP"])


# --- the exported script


def test_an_exported_script_is_the_cell_below_a_header(notebook):
    """Nothing is added that the cell does not need."""
    cell = parse(notebook, "import os\nos.getpid()\n\n\n")
    assert cell.export() == (
        f"# Made by air_magic from cell In[{cell.number}] of a notebook.\n"
        "# Run it with: torchrun --nproc-per-node N train.py\n"
        "# %%distributed -n 2\nimport os\nos.getpid()\n"
    )


def test_an_exported_script_prints_what_the_cell_prints(notebook, tmp_path):
    """Not the value of its last expression."""
    body = "'''doc'''\nfrom __future__ import annotations\nx: Missing = 1\nprint(__name__, __doc__, x, scale)\nx + 1"
    script = parse(notebook, body).export({"scale": "scale = 10", "helper": "def helper(): ..."})
    assert run_script(script, tmp_path) == "__main__ doc 1 10\n"


def test_an_exported_script_has_display(notebook, tmp_path):
    """Only if it is used."""
    script = parse(notebook, "from __future__ import annotations\ndisplay({'a': 1})").export()
    assert script.count("from IPython.display import display") == 1
    assert run_script(script, tmp_path) == "{'a': 1}\n"


def test_an_exported_script_runs_shell_syntax(notebook, tmp_path):
    """In order with what the program prints, through the same shell that ranks have."""
    body = """
        from __future__ import annotations
        import os, sys
        print("one", end=" ")
        !echo two
        name = "three"
        def f():
            local = "four"
            found = !echo {name} $local
            return found[0]
        print(f())
        %env AIR=five
        !echo $AIR
        %cd -q /
        print(os.getcwd())
        %time x = 6
        print(x)
        %timeit -n 1 -r 1 x + 1
        display(7)
        !exit 8
        print(_exit_code, hasattr(sys, "ps1"), sys.modules["__main__"].__dict__ is globals())
        print(type(exit).__module__, "In" in globals(), "new_shell" in globals())
    """
    script = parse(notebook, body).export()
    printed = run_script(script, tmp_path)
    for pattern, text in {r"CPU times: .*\nWall time: .*": "<time>", r"[\d.]+ .s ± .*": "<timeit>"}.items():
        printed = re.sub(pattern, text, printed)
    assert printed.splitlines() == [
        *["one two", "three four", "env: AIR=five", "five", "/", "<time>", "6", "<timeit>", "7"],
        *["8 False True", "_sitebuiltins False True"],
    ]


def test_a_rank_imports_no_ipython_for_a_plain_cell():
    """It costs a rank 100 ms."""
    code = "import sys, air_magic.cell; print('IPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.stdout, done.stderr) == ("False\n", "")
