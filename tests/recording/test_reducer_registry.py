"""The registry of reducers."""

import pytest

from dlm_lens.recording.reducer_registry import REDUCERS, ReducerEntry


def test_values_that_are_not_there_are_told_where_the_entry_is_made() -> None:
    # "counts" was read as a class of queries, and every number after the colon was refused as no such class.
    with pytest.raises(ValueError, match="values of mine is 'counts'; did you mean count"):
        ReducerEntry(name="mine", kind="Mine", setting="k", values="counts")
    assert ReducerEntry(name="mine", kind="Mine", setting="k", values=("a", "b")).read("b", "--reducers") == "b"
    assert REDUCERS["top-keys"].read("3", "--reducers") == 3
