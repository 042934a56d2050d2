"""`benchmarks.peers` without its peers: rows that cannot run are named, and differences are seen."""

import pytest
import torch
import typer

from benchmarks.peers import ROWS, main, same_tokens, same_values


def test_rows_without_a_checkout_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(rows="llada-sampler,fast-dllm", threads=torch.get_num_threads())
    printed = capsys.readouterr().out
    assert "left out: llada-sampler (give --dllm CHECKOUT), fast-dllm (give --fast-dllm CHECKOUT)" in printed


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=f"no row speed; there are {', '.join(ROWS)}"):
        main(rows="speed")


def test_differences_are_seen() -> None:
    assert same_tokens(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 5]])) == "75.0% of the tokens equal"
    assert same_values([-10.0, -20.0], [-10.0, -20.5]) == "2 values, largest difference 5.0e-01 nats of up to 20"
