"""aot_tune.declare.declaration: what a kernel may be called (FAULTS B14)."""

from __future__ import annotations

import pytest

from aot_tune.declare.declaration import check_name, is_name
from aot_tune.errors import DeclarationError


@pytest.mark.parametrize("name", ["a", "rms_norm", "matmul2", "x" * 64])
def test_a_plain_lower_case_name_is_taken(name):
    check_name(name)
    assert is_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 65, "x" * 300, "Matmul", "mat mul", "1st", "_x",
     "a.json", "..", "café", "a\n", "a٣", None, 3, b"matmul"],
)  # fmt: skip
def test_b14_a_name_that_could_leave_its_folder_is_refused_and_told_what_to_write(name):
    assert not is_name(name)
    with pytest.raises(DeclarationError, match=r"lower-case name .* such as 'rms_norm'") as caught:
        check_name(name)
    assert len(str(caught.value)) < 300
