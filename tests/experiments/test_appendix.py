"""Pages of results: counts of verdicts, the correction for many comparisons, commands that reproduce."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from dlm_lens.cli.options import loading_options
from dlm_lens.experiments.experiment import Bench, Experiment, Finding, Rendering, Table
from dlm_lens.experiments.pages.appendix import Entry, command, corrected, entries, glance, on_correction, section
from dlm_lens.experiments.results import Item, Record, Results
from dlm_lens.experiments.runner import scale_of
from dlm_lens.option_values import read_setting

PS = (0.001, 0.01, 0.04, 0.049, 0.5)


def experiment(**changes: Any) -> Experiment:
    def run(item: Item, settings: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
        return {}

    whole: dict[str, Any] = {
        "name": "planted", "shows": "2510.15731, Figure 99", "title": "planted findings", "metric": "a share",
        "small": {"n": 2, "task": {}, "names": ["a"]}, "full": {"n": 9, "task": {}, "names": []},
        "items": lambda settings: [{"place": 0}], "run": run, "render": lambda results: Rendering(),
    }  # fmt: skip
    return Experiment(**whole | changes)


def planted() -> Entry:
    findings = [Finding(f"claim {n}", "here", "agrees" if p < 0.05 else "undecided", p=p) for n, p in enumerate(PS)]
    findings += [Finding("said", "here", "agrees", null="none"), Finding("none", "here", "no counterpart")]
    results = Results({"small": True, "settings": {"n": 2}}, [Record({"place": 0}, {}, 0.0)], missing=1)
    tables = [Table("numbers", ["n"], [["7"]])]
    return Entry(experiment(), Path("planted"), results, Rendering(tables, {}, findings, ["a note"]))


def test_verdicts_that_do_not_survive_the_correction_are_counted_and_marked() -> None:
    one = planted()
    after = corrected([one])
    assert list(after.values()) == pytest.approx(stats.false_discovery_control(PS))
    # 0.04 and 0.049 become 0.061: of four decided comparisons two remain.
    assert glance([one]).splitlines()[-1].split("|")[3:-1] == [" 5 ", " 0 ", " 1 ", " 1 ", " 2 "]
    text = on_correction([one])
    assert "5 statements are compared" in text
    assert "4 of the comparisons are decided" in text
    assert "0.1 would be decided for the paper by chance" in text
    assert "2 remain" in text
    assert "1 further verdicts" in text
    page = "\n".join(section(one, {}, after))
    marked = [line for line in page.splitlines() if "(not after the correction)" in line]
    assert [re.search(r"claim (\d)", line)[1] for line in marked] == ["2", "3"]
    assert "1 of 2 items are missing" in page


def test_the_command_gives_the_settings_back() -> None:
    one = experiment()
    given = {"n": 5, "task": {"": "toy_arithmetic", "smollm2": "english"}, "names": ["x", "y"]}
    line = command(one, Results(one.config(True, given=given), []))
    assert line.startswith("dlm-lens experiment planted --small --set n=5 ")
    quoted = re.findall(r"--set (?:'([^']*)'|(\S+))", line)
    assert dict(read_setting(a or b) for a, b in quoted) == given


def test_the_command_and_the_scale_say_how_the_models_were_loaded() -> None:
    """Without the dtype the printed command was refused where it was to continue these results."""
    one, load = experiment(), {"mask_token_id": 5, "sampler": "p2", "adapter": "my factors", "check": False}
    results = Results({**one.config(True), "dtype": "bfloat16", "load": load}, [])
    words = shlex.split(command(one, results))
    assert words[3:6] == ["--small", "--dtype", "bfloat16"]
    assert set(words[6::2]) == {"--load"}
    assert loading_options(words[7::2]) == load
    assert scale_of(results).endswith(f", dtype='bfloat16', load={load!r}).")


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no results"):
        entries([experiment()], tmp_path)
