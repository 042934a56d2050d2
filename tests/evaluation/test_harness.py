"""The harness's language model: its own arguments, and what several processes exchange."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM
from dlm_lens.evaluation.harness import SharedLM
from dlm_lens.recording import TopKeys
from tests.evaluation.conftest import ask


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device that is asked for is there")
def test_the_harness_default_device_is_the_cpu_where_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    for lm in (
        SharedLMOfArguments.create_from_arg_string("a=1", {"device": "cuda:0", "batch_size": None}),
        SharedLMOfArguments.create_from_arg_obj({"a": 1}, {"device": "cuda:0", "batch_size": None}),
    ):
        assert lm.given == {"a": 1, "device": "cpu"}
    assert caplog.text.count("requests cuda:0") == 2
    assert SharedLMOfArguments.create_from_arg_obj({}, {"device": "cpu"}).given == {"device": "cpu"}
    with pytest.raises(ValueError, match="0 CUDA devices"):
        HarnessLM("toy", device="cuda:0")  # asked for by name, it is refused


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed=abc", "seed is 'abc'; it must be a whole number"),
        ("seed=1.5", "seed is 1.5; it must be a whole number"),
        ("add_bos=no", "add_bos is 'no'; it must be True or False"),
        ("max_length=long", "max_length is 'long'; it must be a whole number"),
        ("max_length=64.5", "max_length is 64.5; it must be a whole number"),
        ("likelihood=mc", "'mc' is no LikelihoodSettings"),
        ("record=recieved,record_to=x", r"record 'recieved' \(did you mean 'received'\?\): there are channels"),
    ],
)
def test_arguments_of_the_harness_are_texts(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HarnessLM.create_from_arg_string(f"model=toy,{text}", {"device": "cpu", "batch_size": None})


def test_reducers_are_named_in_a_text(tmp_path: Path) -> None:
    text = f"model=toy,record=top-keys:3,record_to={tmp_path}/all"
    lm = HarnessLM.create_from_arg_string(text, {"device": "cpu", "batch_size": None})
    assert lm.recordings is not None
    assert lm.recordings.settings.reducers == [TopKeys(3)]


class SharedLMOfArguments(SharedLM):
    """Keeps its arguments."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def loglikelihood(self, requests: Any) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = generate_until = loglikelihood


def test_alone_there_is_nothing_to_exchange(llada: Any) -> None:
    lm = HarnessLM(llada)
    assert (lm.rank, lm.world_size) == (0, 1)
    assert lm.gather_object({"a": 1}) == [{"a": 1}]
    assert lm.all_gather(torch.tensor([2, 3])).tolist() == [2, 3]
    lm.barrier()


class TestTwo:
    """Process 1 of two, with a group that answers for the other."""

    @pytest.fixture
    def lm(self, llada: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        def gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            parts[0].copy_(own - 1)
            parts[1].copy_(own)

        def objects(own: Any, found: list[Any] | None, dst: int) -> None:
            assert (found is None) == (dst != 1)
            if found is not None:
                found[:] = ["other", own]

        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "all_gather", gather)
        monkeypatch.setattr(torch.distributed, "gather_object", objects)
        return HarnessLM(llada, responses=tmp_path / "a.jsonl", record_to=tmp_path / "recordings")

    def test_what_they_exchange(self, lm: Any) -> None:
        assert (lm.rank, lm.world_size) == (1, 2)
        assert lm.all_gather(torch.tensor(5)).tolist() == [4, 5]
        assert lm.gather_object("own", dst=1) == ["other", "own"]
        assert lm.gather_object("own", dst=0) is None

    def test_each_has_its_own_answers_and_its_own_index(self, lm: Any, tmp_path: Any) -> None:
        lm.generate_until(ask("generate_until", ("w1 w2", {"until": []})))
        assert {one.name for one in tmp_path.iterdir()} == {"a.1.jsonl", "recordings"}
        assert {one.name for one in (tmp_path / "recordings").iterdir()} == {"requests.1.jsonl", "task"}

    @pytest.mark.long
    def test_what_the_harness_pads_a_share_with_is_not_recorded(self, lm: Any, tmp_path: Any) -> None:
        # Two documents of this process, two draws each; the largest share has four documents.
        requests = [
            Instance("generate_until", {}, (text, {"until": []}), 0, metadata=("task", number, 2))
            for number, text in enumerate(("w1 w2", "w3 w4"))
        ]
        copies = [one for one in requests for _ in range(2)]
        found = lm.generate_until([*copies, *[requests[-1]] * 4])
        assert found[4:] == [found[2], found[3]] * 2
        wanted = ["00000-0", "00000-0-r1", "00001-0", "00001-0-r1"]
        assert sorted(path.name for path in (tmp_path / "recordings/task").iterdir()) == wanted
        scored = Instance("loglikelihood", {}, ("w1", " w2"), 0, metadata=("other", 5, 1))
        lm.loglikelihood([scored, scored, scored])
        assert [path.name for path in (tmp_path / "recordings/other").iterdir()] == ["00005-0"]
        lines = (tmp_path / "recordings/requests.1.jsonl").read_text().splitlines()[1:]
        assert [json.loads(line)["answer"]["also"] for line in lines] == [[]] * 5


@pytest.mark.long
def test_an_ar_model_has_the_numbers_of_the_harness_s_own_model() -> None:
    """But for whole texts: there `hf` scores the beginning-of-text token too, unless its tokenizer adds none."""
    model = dl.load("toy-ar")
    ours, theirs = (
        HarnessLM(model),
        HFLM(pretrained=model, tokenizer=model.tokenizer, max_length=model.config.max_position_embeddings),
    )
    # An AR model's inputs lack the last token of a window, which a canvas holds.
    positions = model.config.max_position_embeddings - 1
    bare = HFLM(pretrained=model, tokenizer=model.tokenizer, max_length=positions, add_bos_token=False)
    prompt = "tom has 5 apples . tom buys 4 more . how many apples ? :"
    pairs = ask("loglikelihood", (prompt, " 5 + 4 = 9 ."), (f"{prompt} 5 + ", "4 = 9"), ("", "tom has 5"))
    found, wanted = ours.loglikelihood(pairs), theirs.loglikelihood(pairs)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in wanted], abs=1e-4)  # batches round apart
    assert [one[1] for one in found] == [bool(one[1]) for one in wanted]
    whole = ask("loglikelihood_rolling", (prompt,), (" ".join([prompt] * 9),))  # the second has several windows
    assert ours.loglikelihood_rolling(whole) == pytest.approx(bare.loglikelihood_rolling(whole), rel=1e-5)
    assert theirs.loglikelihood_rolling(whole)[0] < ours.loglikelihood_rolling(whole)[0] - 1
    generated = ask("generate_until", (prompt, {"until": ["."], "max_gen_toks": 8, "do_sample": False}))
    assert ours.generate_until(generated) == theirs.generate_until(generated)
