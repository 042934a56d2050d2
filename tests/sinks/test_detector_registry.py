"""The registry of detectors and the parser of their texts."""

import subprocess
import sys

import pytest
import torch

from dlm_lens.sinks import AboveMean, AboveStd, Detector, TopK, as_detector, find_sinks, received_from_pattern
from dlm_lens.sinks import detector_registry as registry
from dlm_lens.sinks.detector_registry import DETECTORS, parse_detector, text_of


def test_every_entry_describes_its_class():
    assert len(DETECTORS) >= 8
    for name, entry in DETECTORS.items():
        rule = parse_detector(name).build()
        assert isinstance(rule, Detector)
        assert type(rule).__name__ == entry.kind, name
        assert entry.load() is type(rule)
        assert text_of(rule).build() == rule


def test_a_range_that_is_not_there_is_told_where_the_entry_is_made():
    # A KeyError at the first text that the rule is given would not say what is wrong.
    with pytest.raises(ValueError, match="values of mine is 'postive'; did you mean positive"):
        registry.DetectorEntry(name="mine", kind="Mine", setting="k", values="postive", formula="score > k")


def test_text_of_a_rule_with_further_settings_is_none():
    assert text_of(AboveStd(2.5)).value == 2.5
    assert text_of(AboveMean(0.03, literal=True)) is None
    assert text_of("above-std:3") is None


def test_as_detector_takes_rules_and_texts():
    assert as_detector("above-std:2") == AboveStd(2.0)
    assert as_detector("top-k:3") == TopK(3)
    rule = AboveMean(1.0)
    assert as_detector(rule) is rule
    for wrong in (None, AboveMean, 3):
        with pytest.raises(TypeError, match="is not a detector; give one with its settings"):
            as_detector(wrong)
    with pytest.raises(ValueError, match="detector 'loud': there are above-mean"):
        as_detector("loud")
    pattern = torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(0)).mul(9).softmax(-1)
    received = received_from_pattern(pattern)
    assert find_sinks(received, "above-std:1").is_sink.equal(find_sinks(received, AboveStd(1.0)).is_sink)


def test_an_entry_with_anything_but_literals_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FOLDER", tmp_path)
    file = tmp_path / "mine.py"
    file.write_text("ENTRY = DetectorEntry(name=NAME)\n")
    with pytest.raises(ValueError, match=r"mine\.py, line 1: .*literals"):
        registry._registry()
    entry = "DetectorEntry(name='mine', kind='Mine', setting='k', values='count', formula='')"
    file.write_text(f"ONE = {entry}\nTWO = {entry}\n")
    with pytest.raises(ValueError, match="two detectors are named 'mine'"):
        registry._registry()
    file.write_text(f"ONE = {entry}\n")
    assert registry._registry()["mine"].module == "dlm_lens.sinks.detectors.mine"


def test_a_text_is_checked_without_torch():
    code = "import sys; from dlm_lens.sinks.detector_registry import parse_detector as p; p('above-std:3'); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
