"""What a run may be asked for, and what a wrong request is told."""

import decimal
import math

import numpy
import pytest

from air_magic.accelerators import AcceleratorType
from air_magic.environment import OWNED
from air_magic.errors import RequestError
from air_magic.options import Options, parse_count, parse_env, parse_timeout


def message(**asked):
    """The text of the RequestError for these options."""
    with pytest.raises(RequestError) as caught:
        Options.checked(**asked)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_asked_gives_the_defaults():
    """Every accelerator, whatever it is, for three hours."""
    assert Options.checked() == Options(
        num_accelerators=None, accelerator_type=None, timeout=10800.0, env={}, name=None
    )


def test_everything_asked_is_kept():
    """Good values come out as they went in."""
    asked = {
        "num_accelerators": 4,
        "accelerator_type": "GPU_4xA10",
        "timeout": 90.5,
        "env": {"NCCL_DEBUG": "INFO", "EMPTY": ""},
        "name": "größer – 2nd try",
    }
    assert Options.checked(**asked) == Options(**asked)


def test_what_this_version_has_may_be_said_aloud():
    """The only accepted values of what is not built yet are the ones that change nothing."""
    assert Options.checked(tracking=False, warm=True, engine="local", num_nodes=1) == Options()


@pytest.mark.parametrize("value", [2, numpy.int64(2), numpy.uint8(2)])
def test_whole_numbers_of_any_library_count(value):
    """An integer is what Python takes as an index."""
    count = Options.checked(num_accelerators=value).num_accelerators
    assert (count, type(count)) == (2, int)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-1, "-1"),
        (True, "True"),
        (False, "False"),
        (2.0, "2.0"),
        (math.nan, "nan"),
        ("2", "'2'"),
        ([2], "[2]"),
        (numpy.bool_(True), repr(numpy.bool_(True))),
        (numpy.float64(2), repr(numpy.float64(2))),
    ],
)
def test_any_other_count_is_refused(value, shown):
    """Text and floats are not rounded or read: whoever wrote 2.5 meant something else."""
    assert message(num_accelerators=value) == (
        f"num_accelerators={shown}: give a whole number from 1, or None for every accelerator of this node"
    )


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        ("GPU_8xH100", "GPU_8xH100"),
        ("gpu_8xh100", "GPU_8xH100"),
        ("GPU_2XRTX4090", "GPU_2xRTX4090"),
        ("cpu", "CPU"),
        (AcceleratorType.GPU_1xA10, "GPU_1xA10"),
        (AcceleratorType.CPU, "CPU"),
    ],
)
def test_types_are_read_in_any_case(value, canonical):
    """A type is kept as plain text in one spelling."""
    kept = Options.checked(accelerator_type=value).accelerator_type
    assert (kept, type(kept)) == (canonical, str)


@pytest.mark.parametrize("value", ["", "H100", "GPU_xH100", "GPU_0xH100", "GPU_8x", "GPU_8xH100\n", "TPU", 8, b"CPU"])
def test_unknown_types_are_refused(value):
    """The text says which form a type has."""
    assert message(accelerator_type=value) == (
        f"accelerator_type={value!r}: give GPU_<n>x<model> such as GPU_8xH100, or CPU, or None to detect it"
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (1, 1.0), (0.5, 0.5), (numpy.float32(2), 2.0), (numpy.int64(3), 3.0)],
)
def test_timeouts_are_seconds_or_none(value, seconds):
    """Numbers of any library are seconds."""
    assert Options.checked(timeout=value).timeout == seconds


@pytest.mark.parametrize(
    "value", [0, -1, math.nan, math.inf, -math.inf, True, "90", "3h", decimal.Decimal(90), 10**400]
)
def test_other_timeouts_are_refused(value):
    """No limit is None and nothing else."""
    text = message(timeout=value)
    assert text.startswith("timeout=")
    assert text.endswith(": give seconds as a number above 0, or None for no limit")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("A=1", "env='A=1': give a dict of text to text, such as {'NCCL_DEBUG': 'INFO'}"),
        ([("A", "1")], "env=[('A', '1')]: give a dict of text to text, such as {'NCCL_DEBUG': 'INFO'}"),
        ({"": "1"}, "env: '' cannot name a variable; give text without '=' and NUL"),
        ({"A=B": "1"}, "env: 'A=B' cannot name a variable; give text without '=' and NUL"),
        ({"A\0": "1"}, r"env: 'A\x00' cannot name a variable; give text without '=' and NUL"),
        ({1: "1"}, "env: 1 cannot name a variable; give text without '=' and NUL"),
        ({"A": None}, "env: A is None; leave it out, or give '' for an empty variable"),
        ({"A": 1}, "env: A is of type int, and variables are text; put the value in quotes, as in {'A': '1'}"),
        ({"A": b"1"}, "env: A is of type bytes, and variables are text; put the value in quotes, as in {'A': '1'}"),
        ({"A": "secret\0"}, "env: the value of A cannot be put into a variable; give text without NUL"),
        ({"A": "\ud800"}, "env: the value of A cannot be put into a variable; give text without NUL"),
        (
            {"CUDA_VISIBLE_DEVICES": "1"},
            "env: CUDA_VISIBLE_DEVICES is set by the launcher; "
            "set it in os.environ before the run to limit which GPUs the run may use",
        ),
    ],
)
def test_what_no_process_can_have_is_refused(value, text):
    """The variable is named; its value, which may be a secret, is not shown."""
    assert message(env=value) == text


def test_what_the_launcher_owns_is_refused():
    """A rank that got another rank's number would hang the run."""
    refused = {name for name in OWNED if f"env: {name} is set by the launcher; " in message(env={name: "1"})}
    assert refused == OWNED
    assert message(env={"RANK": "1"}) == "env: RANK is set by the launcher; leave it out"


def test_env_is_a_copy():
    """A dict that changes after the check changes nothing."""
    env = {"A": "1"}
    options = Options.checked(env=env)
    env["RANK"] = "7"
    assert options.env == {"A": "1"}


@pytest.mark.parametrize("value", ["", "  ", "a\nb", "a\tb", "a\x1b[31mb", "a\u2028b", "x" * 201, 7, b"x"])
def test_names_are_one_line(value):
    """A name stands in a table and in a terminal."""
    text = message(name=value)
    assert text.startswith("name=")
    assert text.endswith(": give one line of at most 200 characters")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"tracking": True}, "tracking=True: MLflow tracking is not part of this version; leave tracking out"),
        (
            {"tracking": "required"},
            "tracking='required': MLflow tracking is not part of this version; leave tracking out",
        ),
        ({"warm": 1}, "warm=1: give True or False"),
        ({"engine": "ray"}, "engine='ray': the Ray engine is not part of this version; leave engine out"),
        ({"engine": "slurm"}, "engine='slurm': there is no such engine; give 'local' or leave engine out"),
        ({"engine": None}, "engine=None: there is no such engine; give 'local' or leave engine out"),
        ({"num_nodes": 2}, "num_nodes=2: this version runs on one node; leave num_nodes out"),
        ({"num_nodes": True}, "num_nodes=True: this version runs on one node; leave num_nodes out"),
        (
            {"accelerator_type": AcceleratorType.SIMULATED},
            "accelerator_type=SIMULATED: simulated accelerators are not part of this version; "
            "give CPU, or leave accelerator_type out",
        ),
    ],
)
def test_what_this_version_has_not_is_refused(asked, text):
    """Nothing is accepted and then ignored."""
    assert message(**asked) == text


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("08", 8), ("all", None), ("None", None)])
def test_a_count_is_read(text, count):
    """A magic's arguments are text."""
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "2.0", "two", "1e1", "²", "9999999"])
def test_a_bad_count_names_its_flag(text):
    """The user wrote a flag, so the error speaks of the flag."""
    with pytest.raises(RequestError) as caught:
        parse_count(text)
    assert str(caught.value) == f"--num-accelerators {text!r}: give a whole number from 1, or all"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("3h", 10800.0), ("1.5H", 5400.0), ("none", None), ("off", None)],
)
def test_a_timeout_is_read(text, seconds):
    """Seconds, minutes or hours."""
    assert parse_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-5", "5d", "h", ".", "nan", "inf", "1h30m"])
def test_a_bad_timeout_names_its_flag(text):
    """The error shows every accepted form."""
    with pytest.raises(RequestError) as caught:
        parse_timeout(text)
    assert str(caught.value) == f"--timeout {text!r}: give a time above 0 such as 90, 90s, 15m or 3h, or none"


def test_a_timeout_beyond_all_numbers_is_refused():
    """What a float cannot hold is no time."""
    with pytest.raises(RequestError, match=r"^--timeout "):
        parse_timeout("9" * 400)


def test_variables_are_read():
    """A value keeps its spaces and its equal signs; the last of one name counts."""
    assert parse_env(["A=1", "B=x = y", "C=", "A=2"]) == {"A": "2", "B": "x = y", "C": ""}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("A", "--env 'A': give NAME=VALUE"),
        ("=1", "--env: '' cannot name a variable; give text without '=' and NUL"),
        ("RANK=1", "--env: RANK is set by the launcher; leave it out"),
    ],
)
def test_a_bad_variable_names_its_flag(item, text):
    """The same rules as for env=, under the flag's name."""
    with pytest.raises(RequestError) as caught:
        parse_env([item])
    assert str(caught.value) == text
