"""Which variables may a file set? Only listed names, only values of their form: nothing that loads
code, names a file or reaches another line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.policy import Policy
from fourfold.spec.site import (
    MAX_VALUE_CHARS,
    is_plain,
    parse_assignments,
    plain_names,
    require_form,
    require_plain,
)

PLAIN = plain_names()

TEXTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
DANGEROUS = TEXTS["dangerous"].split()


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_loads_code_or_writes_files_is_not_for_files(name: str) -> None:
    for value in ("/tmp/x.so", "x", "1", ""):
        assert not is_plain(name, value)
        with pytest.raises(UserError, match=f"--env {name}="):
            require_plain(((name, value),))
        require_plain(((name, value),), granted=((name, value),))
        with pytest.raises(UserError, match=name):
            require_plain(((name, value),), granted=((name, value + "2"),))


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "FOURFOLD_JOB", "TORCHELASTIC_RUN_ID"])
def test_what_the_launcher_says_itself_is_nobodys(name: str) -> None:
    with pytest.raises(UserError, match="its own processes"):
        require_plain(((name, "1"),), granted=((name, "1"),))


@given(
    st.sampled_from(sorted(PLAIN)) | st.text(max_size=12),
    st.text(max_size=40)
    | st.from_regex(r"(/|\.\./|~/|\./)[a-z/.]{0,20}(\.so(\.[0-9])?)?", fullmatch=True),
)
@example("NCCL_NET", "/tmp/libnccl-net.so")
@example("NCCL_NET", "IB\n")
@example("OMP_NUM_THREADS", "1\x00LD_PRELOAD=x")
@example("NCCL_SOCKET_IFNAME", "eth0/../x")
@example("CUDA_VISIBLE_DEVICES", "")
@example("nccl_debug", "INFO")
@example("NCCL_DEBUG ", "INFO")
@example("", "")
def test_anything_else_needs_the_flag(name: str, value: str) -> None:
    """Accepted is a listed name with a plain word; nothing else ever is."""
    try:
        require_form(((name, value),))
        require_plain(((name, value),))
    except UserError:
        assert name not in PLAIN or not is_plain(name, value)
        return
    assert name in PLAIN
    assert not set(value) & set("/\\$`~%'\"<|&*?!\n\r\t\0")
    assert value.isprintable()


@given(st.text(max_size=5), st.text(max_size=5))
def test_a_policy_is_made_or_refused(name: str, value: str) -> None:
    try:
        policy = codec.decode(Policy, {"env": {name: value}})
    except UserError:
        return
    assert policy.env == ((name, value),)
    assert value.isprintable()
    assert "=" not in name


@pytest.mark.parametrize(
    "value", ["a\nb", "a\x00", "\x1b[2J", "\ud800", "x" * (MAX_VALUE_CHARS + 1)]
)
def test_odd_values_are_nobodys(value: str) -> None:
    with pytest.raises(UserError, match="printable"):
        Policy(env=(("NCCL_DEBUG", value),))
    with pytest.raises(UserError, match="printable"):
        parse_assignments([f"X={value}"])


def test_the_listed_ones_people_use() -> None:
    for word in TEXTS["listed"]:
        require_plain(parse_assignments([word]))


def test_one_name_with_two_values() -> None:
    assert parse_assignments(["A=1", "B=x=y", "A=1"]) == (("A", "1"), ("B", "x=y"))
    with pytest.raises(UserError, match="two values"):
        parse_assignments(["A=1", "A=2"])
    for word in ("A", "=1", "A B=1", "LD-X=1"):
        with pytest.raises(UserError):
            parse_assignments([word])
