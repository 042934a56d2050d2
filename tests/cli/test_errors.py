"""Advice for Python as advice for a command line."""

import pytest

from dlm_lens.cli import app as cli
from dlm_lens.cli import errors


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("pass seed=... to repeat it", "pass --seed to repeat it"),
        ("no seed; pass seed=3", "no seed; pass --seed 3"),
        ("use scope='answer' or cfg_scale=0", "use scope='answer' or cfg_scale=0"),
        ("gen_length is 3; block_length=3 divides it", "--gen-length is 3; --block-length 3 divides it"),
        ("steps is 0; it must be at least 1", "--steps is 0; it must be at least 1"),
        ("3 steps; AboveMean(seed=1, steps=2) stays", "3 steps; AboveMean(seed=1, steps=2) stays"),
        ("give layers=, or none", "give --layers, or none"),
        ("the run has batch_size 3 (batch_size=4)", "the run has --batch-size 3 (--batch-size 4)"),
        ("no recording; dlm_lens.record(..., to=) writes one", "no recording; dlm-lens record writes one"),
        ("record with ReceivedAttention(queries='masked')", "record with --reducers received:masked"),
        ("record with ReceivedAttention(queries='all'), it has x", "record with --reducers received:all, it has x"),
        ("no norms; record with ValueNorm()", "no norms; record with --reducers value-norm"),
        (
            "record with ValueNorm() or ValueNorm('mean')",
            "record with --reducers value-norm or --reducers value-norm:mean",
        ),
        ("no x; record with MassiveActivations()", "no x; record with --reducers massive"),
        ("record with Mine() or TopK(k=f(x))", "record with Mine() or TopK(k=f(x))"),
        ("pass mask_token_id= to dlm_lens.load", "give --load mask_token_id="),
        (
            "pass the right mask_token_id= or eos_token_id= to dlm_lens.load",
            "give the right --load mask_token_id= or --load eos_token_id=",
        ),
        ("pass size= (170, 340) to dlm_lens.load, or", "give --load size= (170, 340), or"),
        ("pass revision= one of the cached commits (a)", "give --load revision= one of the cached commits (a)"),
        ("give its base model and adapter='x', or", "give its base model and --load adapter='x', or"),
        ("device_map 'gpu' names no device", "--device 'gpu' names no device"),
        ("a path /data/batch_size/x and my_steps=3", "a path /data/batch_size/x and my_steps=3"),
        ("give another directory, to=x", "give another directory, --out x"),
        ("record its layer alone, layers=[1]", "record its layer alone, --layers 1"),
        ("take layers=[0, -1], or Layers(layers=[0])", "take --layers 0,-1, or Layers(layers=[0])"),
        (
            "x holds a recording with settings gen_length = '16', and now it is None; with settings seeds = "
            "[0, 0], and now it is [3, 3]; with settings top_p = None, and now it is '0.5'; with "
            "settings remasking = \"'random'\", and now it is \"'topk'\"; give the same",
            "x holds a recording with --gen-length 16, and now without --gen-length; with --seed 0, and now with "
            "--seed 3; without --set top_p, and now with --set top_p=0.5; with --remasking random, and now with "
            "--remasking topk; give the same",
        ),
        (
            "x holds a recording with model dtype = 'torch.float32', and now it is 'torch.float64'; with layers = "
            "[0, 1], and now it is [1]; with dtype = 'float32', and now it is 'float16'; give the same",
            "x holds a recording with --dtype float32, and now with --dtype float64; with --layers 0,1, and now "
            "with --layers 1; with --storage float32, and now with --storage float16; give the same",
        ),
        (
            "the llada sampler has no setting 'top_p'; it has steps, gen_length, cfg_scale, remasking, eot_token",
            "the llada sampler has no setting 'top_p'; it has --steps, --gen-length, --remasking; with --set: "
            "cfg_scale, eot_token",
        ),
        (
            "toy has no learned sink tokens; give the Sinks of find_sinks",
            "toy has no learned sink tokens; leave out --learned",
        ),
        (
            "prompt 0: this model has no tokenizer, so it takes token ids only; or set model.tokenizer",
            "prompt 0: this model has no tokenizer, which texts and chats need: put its files (tokenizer.json) "
            'into the directory of the weights, or give ids, {"input_ids": [...]}',
        ),
    ],
)  # fmt: skip
def test_advice_names_the_options_of_the_command(sentence: str, shown: str) -> None:
    assert errors.as_command_line(sentence, cli._options(["record", "toy"])) == shown
    if "--storage" in shown:  # as `dlm-lens eval --record` takes it
        of_eval = errors.as_command_line(sentence, cli._options(["eval", "toy"]))
        assert "with --record-storage float32, and now with --record-storage float16" in of_eval


def test_a_command_without_arguments_of_load_does_not_advise_them() -> None:
    with_load, without = (cli._options([command, "x"]) for command in ("experiment", "plan"))
    shown = errors.as_command_line("pass mask_token_id= to dlm_lens.load", without)
    assert shown == "put mask_token_id into its config.json"
    assert "--load" not in errors.as_command_line("pass revision= one of the cached commits (a)", without)
    for sentence in ("pass mask_token_id= to dlm_lens.load", "pass revision= one of the cached commits (a)"):
        assert "--load" in errors.as_command_line(sentence, with_load)


def test_a_model_without_a_chat_template_is_evaluated_without_the_option() -> None:
    shown = errors.as_command_line(
        "no template; evaluate without apply_chat_template", cli._options(["eval", "toy"])
    )
    assert shown == "no template; evaluate without --chat"
