"""transformers' common model tests for a tiny model of a family, from the sdist of the installed version.

The sdist holds the top-level files of the tests alone. `test_modeling_common.py` imports base classes from two
files of other folders, which stay empty here: exporters (torch.export) and generation (`generate`, which masked
DLMs refuse).
"""

import contextlib
import copy
import importlib
import sys
import types
import unittest
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from transformers.utils import logging

from dlm_lens.attention import computed_span
from dlm_lens.testing import tiny
from tests.suites.sdists import unpacked_sdist, wheel

PACKAGE = "transformers_sdist_tests"
ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
BATCH, LENGTH = 3, 7


@cache
def model_tester_mixin() -> type[Any]:
    """`ModelTesterMixin` of the sdist; skips the test that asks where it cannot be fetched."""
    folder = unpacked_sdist("transformers") / "tests"
    sys.path.append(str(wheel("parameterized", "0.9.0")))
    root = types.ModuleType(PACKAGE)
    root.__path__ = [str(folder)]
    sys.modules[PACKAGE] = root
    for name, base in ABSENT.items():
        module = types.ModuleType(f"{PACKAGE}.{name}")
        setattr(module, base, type(base, (), {}))
        sys.modules[f"{PACKAGE}.{name.partition('.')[0]}"] = types.ModuleType(name)
        sys.modules[module.__name__] = module
    with patch.object(pytest, "mark", _NoMarks()):  # ours are strict, and unittest reads none
        return importlib.import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin


class _NoMarks:
    """In place of `pytest.mark`: decorators that do nothing."""

    def __getattr__(self, name: str) -> Any:
        def mark(*given: Any, **options: Any) -> Any:
            return given[0] if len(given) == 1 and callable(given[0]) else lambda test: test

        return mark


class FamilyTester:
    """What the common tests ask for configs and inputs. Sinks count among the positions of states and patterns."""

    batch_size = BATCH
    seq_length = LENGTH
    num_hidden_layers = 2
    is_training = True

    def __init__(self, config: Any, canvas: bool) -> None:
        self.config, self.canvas = config, canvas
        self.hidden_size = self.config.hidden_size
        self.num_attention_heads = self.config.num_attention_heads
        self.encoder_seq_length = self.key_length = LENGTH + getattr(self.config, "num_sinks", 0)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.config.vocab_size - 3, (BATCH, LENGTH), generator=generator)
        content = torch.ones_like(ids)
        content[0, 0] = 0
        config = type(self.config).from_dict(self.config.to_dict())
        inputs = {"input_ids": ids, "attention_mask": content}
        if self.canvas:  # beside an encoder, as transformers' own code calls the model
            inputs["decoder_input_ids"] = torch.randint(
                0, self.config.vocab_size - 3, (BATCH, 5), generator=generator
            )
        return config, inputs


def common_tests(family: str, settings: Mapping[str, Any]) -> type[unittest.TestCase]:
    """The common tests of a tiny model of a family, as a class of unittest."""
    mixin = model_tester_mixin()
    # Built once, for its config: each of more than a hundred tests has a tester of its own, which asks for it.
    model: Any = tiny(family, **settings)
    canvas = computed_span(model, LENGTH) is not None

    class CommonTests(mixin, unittest.TestCase):  # type: ignore[misc, valid-type]
        all_model_classes: ClassVar = (type(model),)
        # "if the model doesn't fully support the original `generate`": a masked DLM refuses it.
        all_generative_model_classes: ClassVar = ()
        test_can_init_all_missing_weights_before_2023 = True
        additional_model_inputs: ClassVar = ["decoder_input_ids"]

        def setUp(self) -> None:
            self.model_tester = FamilyTester(copy.deepcopy(model.config), canvas)  # tests change it

        def _prepare_for_class(self, inputs_dict: Any, model_class: Any, return_labels: bool = False) -> Any:
            inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
            if (
                return_labels and "decoder_input_ids" not in inputs
            ):  # the mixin gives them to class names of transformers alone
                inputs["labels"] = torch.zeros((BATCH, LENGTH), dtype=torch.long)
            return inputs

    return CommonTests


@dataclass
class Outcome:
    """Names of the tests that passed, reasons of those that were skipped, tracebacks of those that failed.

    `other_turns` are the names of those that were left to other models.
    """

    passed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    other_turns: set[str] = field(default_factory=set)


class _Recorder(unittest.TestResult):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.outcome.passed.add(test._testMethodName)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        # Of a part of a test that goes on: of the test, named first in the part's id.
        name = getattr(test, "test_case", test)._testMethodName
        self.outcome.skipped[name] = reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.outcome.failed[test._testMethodName] = self._exc_info_to_string(err, test)

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


SDPA = "test_eager_matches_sdpa_inference_"
"""Tests 00 to 23 of this name: 3 dtypes x padding left or right x with a mask or without x kernels on or off."""

ALIAS = "test_bc_torch_dtype"
"""Loads a model 14 times, by `torch_dtype` and by `dtype`, in transformers' `from_pretrained`, which no family has
of its own."""


def tests_of_other_turns(turn: int, names: Iterable[str]) -> set[str]:
    """What a model leaves to the others: 18 of the 24 settings of `SDPA`, and `ALIAS` in three of four models.

    Each dtype is run with two settings that differ in all else, so a model runs every value of every setting
    with every dtype; four models in turn run all 24.
    """
    own = {(turn + dtype) % 4 + 8 * dtype for dtype in range(3)}
    own |= {8 * (setting // 8) + 7 - setting % 8 for setting in own}
    left = tuple(f"{SDPA}{setting:02}_" for setting in set(range(24)) - own)
    return {name for name in names if name.startswith(left) or (name == ALIAS and turn % 4)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the tests compute and nobody reads.

    Messages of comparisons hold every tensor printed in full, and are written where all is equal too; progress bars
    start threads; without a device, each seed is kept for it with a formatted traceback.
    """
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    torch.set_printoptions(threshold=1, edgeitems=1)
    seeds = patch("torch.cuda.manual_seed_all") if not torch.cuda.is_available() else contextlib.nullcontext()
    try:
        with seeds:
            yield
    finally:
        torch.set_printoptions(profile="default")
        if bars:
            logging.enable_progress_bar()


def run_common_tests(family: str, settings: Mapping[str, Any], excluded: Mapping[str, str], turn: int) -> Outcome:
    """Run them in this process, but for those excluded by name and `tests_of_other_turns`.

    Raises:
        ValueError: an excluded name that is no test, or names of tests that are not as supposed.
    """
    tests = common_tests(family, settings)
    names = unittest.TestLoader().getTestCaseNames(tests)
    unknown = set(excluded) - set(names)
    if unknown:
        raise ValueError(f"excluded, but no tests: {sorted(unknown)}")
    outcome = Outcome(other_turns=tests_of_other_turns(turn, names))
    if len(outcome.other_turns) != 18 + bool(turn % 4):
        raise ValueError(f"the tests' names are others than supposed; left out are {sorted(outcome.other_turns)}")
    recorder = _Recorder(outcome)
    with _quiet():
        for name in names:
            if name not in excluded and name not in outcome.other_turns:
                tests(name).run(recorder)
    return outcome
